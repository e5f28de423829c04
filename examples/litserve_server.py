"""An OpenAI-compatible endpoint on LitServe: `python examples/litserve_server.py [port]`."""

from __future__ import annotations

import sys

from pagedcore import EngineConfig
from pagedcore_adapters.litserve_api import build_server

if __name__ == "__main__":
    build_server(EngineConfig(max_num_seqs=64)).run(host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
