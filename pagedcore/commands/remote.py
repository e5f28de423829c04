"""Asking a running server from the command line."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from pagedcore.errors import AuthenticationError, ConfigError, EngineClosedError, OperatorOnlyError, PagedCoreError

TIMEOUT_S = 10.0


def ask_server(url: str, route: str, api_key: str | None) -> Any:
    """The JSON of an operator's route, such as /v1/stats, of the server at a base URL (with or without /v1).

    Raises `ConfigError` for what is no URL of a server, `EngineClosedError` when it does not answer, and `AuthenticationError`
    or `OperatorOnlyError` when the key will not do.
    """
    address = _base(url) + route
    request = urllib.request.Request(address, headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:  # _base lets http and https through only
            return json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error.code, address) from error
    except (OSError, ValueError) as error:
        raise EngineClosedError(f"{address} gave no answer ({type(error).__name__}: {error}); is a pagedcore server there?") from error


def _base(url: str) -> str:
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"The URL is {url!r} and must be that of a server, such as http://127.0.0.1:8000.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _refusal(status: int, address: str) -> PagedCoreError:
    if status == 401:
        return AuthenticationError("The server wants an API key, or another one; give it with --api-key or PAGEDCORE_API_KEY.")
    if status == 403:
        return OperatorOnlyError("The key belongs to a tenant; give one of the server's own api_keys.")
    if status == 404:
        return EngineClosedError(f"{address} does not exist: no pagedcore server, or one with allow_operator_routes=False.")
    return EngineClosedError(f"{address} answered HTTP {status}.")
