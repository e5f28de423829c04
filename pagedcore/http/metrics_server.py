"""The metrics of this process over HTTP, where it has no server of its own."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from pagedcore.observe.exposition import metrics_text

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class MetricsServer:
    """Owns a thread that serves `metrics_text` over HTTP, on any path."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="pagedcore-metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics_server(port: int, addr: str = "127.0.0.1", registry: CollectorRegistry | None = None) -> MetricsServer:
    """Serve the metrics of this process; port 0 takes a free one. Raises `OSError` when the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, content_type = metrics_text(registry, self.headers.get("Accept", ""))
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name is http.server's
            """Scrapes are not logged."""

    return MetricsServer(ThreadingHTTPServer((addr, port), Handler))
