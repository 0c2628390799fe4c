"""The built-in web page: its files, and the headers that keep them harmless.

Owns which files there are and what a browser may do with them: load from this server, talk to it, and nothing else. The files hold no
secret, so they need no API key; what they ask the server does. Knows nothing of the engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from pegainfer_server.http_errors import ApiError

FOLDER = "/ui/"
INDEX = "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # no text can become HTML, by mistake either
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
    "Vary": "Accept",  # at /, who asks for no HTML gets JSON
}


@dataclasses.dataclass(frozen=True, slots=True)
class UiFile:
    """One file as it is sent."""

    content: bytes
    media_type: str
    etag: str


@cache
def ui_files() -> dict[str, UiFile]:
    """All files by name."""
    found = {}
    for item in files("pegainfer_server").joinpath("ui").iterdir():
        ending = item.name[item.name.rfind(".") :]
        if ending in MEDIA_TYPES:
            content = item.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[item.name] = UiFile(content, MEDIA_TYPES[ending], etag)
    return found


def wants_html(headers: Headers) -> bool:
    """Whether a browser asks, and not a probe."""
    return "text/html" in headers.get("accept", "")


def is_ui(scope: Scope) -> bool:
    """Whether an HTTP request is for the page or one of its files."""
    path: str = scope["path"]
    return path.startswith(FOLDER) or (path == "/" and wants_html(Headers(scope=scope)))


def respond(name: str, request: Request) -> Response:
    """A file; 304 if the browser has it. Raises ApiError (404) for a name that is none."""
    file = ui_files().get(name)
    if file is None:
        raise ApiError(404, "there is no such route")
    headers = {**HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def router() -> APIRouter:
    """The routes of all files but the page itself, which is at /."""
    routes = APIRouter()

    @routes.api_route(FOLDER + "{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def get_file(name: str, request: Request) -> Response:
        """A file of the page."""
        return respond(name, request)

    return routes
