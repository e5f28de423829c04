"""A LitServe server as a user writes it: python litserve_app.py PORT CONFIG_JSON [NUM_API_SERVERS]."""

from __future__ import annotations

import json
import sys

from pagedcore_adapters.litserve_api import build_server

if __name__ == "__main__":
    port, config, *rest = sys.argv[1:]
    build_server(json.loads(config), num_api_servers=int(rest[0]) if rest else None).run(host="127.0.0.1", port=int(port))
