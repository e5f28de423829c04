"""Every error that pagedcore raises on purpose, in one tree.

::

    PagedCoreError                          500
    |-- ConfigError (ValueError)            500   a setting of EngineConfig is wrong
    |   `-- UnknownOptionError (TypeError)  500   a keyword that does not exist; names the nearest one
    |-- RequestError (ValueError)           400   one request is wrong; the engine is well
    |   |-- InvalidRequestError             400   a value out of range, a malformed body
    |   |   |-- UnsupportedFeatureError     400   valid elsewhere, not offered here
    |   |   |-- PromptTooLongError          400   prompt (+ max_tokens) above max_model_len
    |   |   |-- RequestTooLargeError        413   a body above max_request_bytes
    |   |   |-- UnsupportedMediaTypeError   415   a body that is not JSON, by what its headers say
    |   |   `-- PoolTooSmallError           400   can never fit the KV pool
    |   |-- AuthenticationError             401
    |   |-- OperatorOnlyError               403
    |   |-- ModelNotFoundError              404
    |   |-- UnknownRequestError             404
    |   `-- QueueFullError                  429   with retry_after_s
    |       `-- TenantQuotaError            429   one tenant's requests fill its part of the queue
    |-- EngineError (RuntimeError)          500
    |   |-- StepFailedError                 500   the step that computed this request failed
    |   |-- NoAnswerError                   504   a question of an operator was not answered in time
    |   |-- EngineUnreachableError          503   no engine answers at a socket
    |   |   `-- EngineRefusedError          503   it is another user's, or of another version
    |   `-- EngineClosedError               503   with retry_after_s
    |-- ModelLoadError (RuntimeError)       500
    |   |-- ModelSourceError                500   a model that cannot be found or fetched
    |   `-- CheckpointError                 500   files that are there and cannot be used
    `-- MissingExtraError (ImportError)     500   an optional dependency; names the extra

Each leaf maps to one HTTP status (`http_status`) and one OpenAI error type (`openai_type`). A message is a sentence:
what is wrong, the value, the limit, the setting to change.
"""

from __future__ import annotations

from pagedcore.shown import shown


class PagedCoreError(Exception):
    """Root of the tree: `except PagedCoreError` catches all that pagedcore raises on purpose."""

    http_status: int = 500
    openai_type: str = "server_error"
    code: str | None = None


class ConfigError(PagedCoreError, ValueError):
    """A setting of `EngineConfig` is out of range, contradicts another one, or cannot work on this machine."""

    code = "invalid_config"


class UnknownOptionError(ConfigError, TypeError):
    """A keyword that no setting has; the message names the nearest one."""


class RequestError(PagedCoreError, ValueError):
    """One request cannot be served; the engine and the other requests are well."""

    http_status = 400
    openai_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(RequestError):
    """A field of the request has a value that is out of range or malformed; `param` names the field."""

    code = "invalid_value"


def id_in_use(request_id: str) -> InvalidRequestError:
    """What a request gets whose id another one has, which goes on."""
    return InvalidRequestError(f"request_id {shown(request_id)} is in use; give each request its own.", param="request_id")


class UnsupportedFeatureError(InvalidRequestError):
    """A field that is valid elsewhere and not offered here: refused, never ignored."""

    code = "unsupported_feature"


class PromptTooLongError(InvalidRequestError):
    """Prompt, or prompt and max_tokens, exceed max_model_len."""

    code = "context_length_exceeded"


class RequestTooLargeError(InvalidRequestError):
    """The body of the request is larger than the server's max_request_bytes."""

    http_status = 413
    code = "request_too_large"


class UnsupportedMediaTypeError(InvalidRequestError):
    """The Content-Type of the body is none of JSON."""

    http_status = 415
    code = "unsupported_media_type"


class PoolTooSmallError(InvalidRequestError):
    """The request can never fit the KV pool, even alone."""

    code = "kv_pool_too_small"


class AuthenticationError(RequestError):
    """No API key, or a wrong one."""

    http_status = 401
    openai_type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFoundError(RequestError):
    """The request names a model that is not served here; the message lists the served ones."""

    http_status = 404
    code = "model_not_found"


class OperatorOnlyError(RequestError):
    """A tenant's key asks for what concerns the whole engine."""

    http_status = 403
    openai_type = "permission_error"
    code = "operator_only"


class UnknownRequestError(RequestError):
    """No request of this id is known, or it is another tenant's."""

    http_status = 404
    code = "request_not_found"


class QueueFullError(RequestError):
    """The waiting queue is at its limit; try again after `retry_after_s` seconds."""

    http_status = 429
    openai_type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TenantQuotaError(QueueFullError):
    """As many requests of this tenant wait as its quota allows; others are still taken."""

    code = "tenant_quota"


class EngineError(PagedCoreError, RuntimeError):
    """The engine could not do its work."""

    code = "engine_error"


class StepFailedError(EngineError):
    """The device step that computed this request failed; other requests go on."""

    code = "step_failed"


class NoAnswerError(EngineError):
    """An engine in another process did not answer an operator's question in time."""

    http_status = 504
    code = "no_answer"


class EngineUnreachableError(EngineError):
    """No engine answers at a socket: none is there, it is another user's, or its version has other messages."""

    http_status = 503
    code = "engine_unreachable"


class EngineRefusedError(EngineUnreachableError):
    """The engine at a socket is another user's, or its version has other messages: trying again does not help."""

    code = "engine_refused"


class EngineClosedError(EngineError):
    """The engine is closed, or closing; try another replica, or again after `retry_after_s` seconds."""

    http_status = 503
    code = "engine_closed"

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelLoadError(PagedCoreError, RuntimeError):
    """A model could not be loaded."""

    code = "model_load_error"


class ModelSourceError(ModelLoadError):
    """The model's files cannot be found or fetched; the message says what to do."""


class CheckpointError(ModelLoadError):
    """The model's files are there and cannot be used; the message names the file, the tensor and the sizes."""


class MissingExtraError(PagedCoreError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    code = "missing_extra"
