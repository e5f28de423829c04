"""Environment variables that configure a service which is started by name: all of them are here."""

from __future__ import annotations

import json
import os

from pagedcore import EngineConfig
from pagedcore.errors import ConfigError

CONFIG = "PAGEDCORE_CONFIG"
"""A JSON object of EngineConfig fields."""
MODEL = "PAGEDCORE_MODEL"
"""The model; goes before the one in PAGEDCORE_CONFIG."""
API_KEY = "PAGEDCORE_API_KEY"
"""Key that clients must send; none lets everybody in."""
CORS_ORIGINS = "PAGEDCORE_CORS_ORIGINS"
"""Origins, separated by spaces, whose web pages may call the server from a browser, or * for all."""
SOCKET = "PAGEDCORE_SOCKET"
"""The Unix socket of an engine that runs already; goes before the model, the config and the prompts to warm up with."""
WARMUP_FILE = "PAGEDCORE_WARMUP_FILE"
"""Prompts computed before the first request: a JSON list of texts and lists of messages, or one text a line."""


def config_from_environment() -> EngineConfig:
    """Raises `ConfigError` for what is no JSON object, and for settings that `EngineConfig` refuses."""
    text = os.environ.get(CONFIG) or "{}"
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{CONFIG} is not valid JSON ({error}): {text!r}.") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{CONFIG} must be a JSON object of EngineConfig fields, got {text!r}.")
    model = os.environ.get(MODEL)
    return EngineConfig.from_mapping({**options, "model": model} if model else options)


def api_keys_from_environment() -> tuple[str, ...]:
    key = os.environ.get(API_KEY)
    return (key,) if key else ()


def cors_origins_from_environment() -> tuple[str, ...]:
    return tuple(os.environ.get(CORS_ORIGINS, "").split())


def warmup_file_from_environment() -> str | None:
    return os.environ.get(WARMUP_FILE) or None


def socket_from_environment() -> str | None:
    return os.environ.get(SOCKET) or None
