"""Errors as the OpenAI API words them: one object, one shape, the right status.

Owns `ApiError` and the mapping from core's exceptions to statuses. Knows nothing of routes. Imports no FastAPI, which takes long and
is not needed before the engine starts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from pegainfer_core.errors import EngineDeadError, RequestError
from starlette.responses import Response

log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_REJECTIONS = {"queue_full": 429}  # every other RejectionCode is the client's own fault: 400


class ApiError(Exception):
    """An answer other than success. `param` names the offending field, `code` is stable and meant for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object, the same in a response and in a stream."""
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> Response:
        """The HTTP response to a request for `path`, whose API words errors in its own way."""
        body = anthropic_error(self) if path.startswith(ANTHROPIC_PATHS) else self.body
        return Response(msgspec.json.encode(body), self.status, headers=self.headers, media_type="application/json")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ANTHROPIC_PATHS = "/v1/messages"
"""Routes that begin like this are told of errors in Anthropic's form."""


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """The error object of Anthropic's API; `param` and `code` are ours."""
    kind = _ANTHROPIC_TYPES.get(error.status) or ("api_error" if error.status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message, "param": error.param, "code": error.code},
    }


def bad_request(message: str, param: str | None = None, code: str = "invalid_request") -> ApiError:
    """A 400; `param` names the field."""
    return ApiError(400, message, code=code, param=param)


def context_exceeded(prompt_tokens: int, max_model_len: int) -> ApiError:
    """A prompt that leaves no room for an answer."""
    return bad_request(
        f"this model's context is {max_model_len} tokens, but the prompt alone has {prompt_tokens} and at least one must be left for the "
        "answer",
        code="context_length_exceeded",
    )


def as_api_error(error: Exception) -> ApiError:
    """What the client is told about `error`. Anything unforeseen is logged in full and told as a bare 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return rejected(str(error), error.code, error.param)
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine is not running: {error}", code="engine_dead")
    log.error("a request failed unexpectedly", exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")


def rejected(message: str, code: str, param: str | None = None) -> ApiError:
    """A refusal by the engine or by the validation of sampling parameters, by its `RejectionCode`."""
    status = _REJECTIONS.get(code, 400)
    return ApiError(status, message, code=code, param=param, headers={"Retry-After": "1"} if status == 429 else None)
