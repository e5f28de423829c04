"""The files of the live page, and the headers that keep it to itself."""

from __future__ import annotations

import functools
from pathlib import Path

from starlette.responses import Response

FOLDER = Path(__file__).parent / "page"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Nothing from elsewhere, nothing inline: what a tenant or a request calls itself cannot run."""

_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_names() -> list[str]:
    """The files, the page itself first."""
    return sorted((path.name for path in FOLDER.iterdir() if path.suffix in MEDIA_TYPES), key=lambda name: (name != "index.html", name))


def page_response(name: str) -> Response:
    """One of the files, by its name in `page_names`."""
    return Response(_read(name), media_type=MEDIA_TYPES[Path(name).suffix], headers=_HEADERS)


@functools.cache
def _read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()
