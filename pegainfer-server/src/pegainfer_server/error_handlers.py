"""The handlers that keep FastAPI's own `detail` shape away from clients.

Owns which exception of a route becomes which answer; the shape of an answer is `http_errors`'.
"""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pegainfer_core.errors import EngineDeadError, RequestError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pegainfer_server.http_errors import ApiError, as_api_error, bad_request

STATUS_CLIENT_GONE = 499  # nobody reads it; it marks the request in access logs

_MESSAGES = {404: "there is no such route", 405: "this route does not take this method"}


async def _on_api_error(request: Request, error: Exception) -> Response:
    return as_api_error(error).response(request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    message = _MESSAGES.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response(request.url.path)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), error
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])
    return bad_request(f"{param}: {first['msg']}", param).response()


async def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=STATUS_CLIENT_GONE)


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of `app` an OpenAI error object."""
    for kind in (ApiError, RequestError, EngineDeadError):
        app.add_exception_handler(kind, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
