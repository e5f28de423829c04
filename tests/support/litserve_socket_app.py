"""LitServe servers of an engine at a Unix socket: python litserve_socket_app.py PORT SOCKET openai|plain NUMBER.

NUMBER is how many API servers (openai) or workers (plain, a stock LitServer) share the engine.
"""

from __future__ import annotations

import sys

import litserve as ls

from pagedcore_adapters.litserve_api import PagedCoreAPI, build_server, stop_on_signals

if __name__ == "__main__":
    port, socket, kind, number = sys.argv[1:]
    if kind == "openai":
        build_server(socket=socket, num_api_servers=int(number)).run(host="127.0.0.1", port=int(port))
    else:
        server = ls.LitServer(PagedCoreAPI(socket=socket), accelerator="cpu", workers_per_device=int(number), timeout=False)
        stop_on_signals()
        server.run(host="127.0.0.1", port=int(port), generate_client_file=False)
