"""The small routes: /, /metrics, /version and /v1/models. All but the last answer before the model is ready.

Owns also which model names are served.
"""

from __future__ import annotations

from typing import Any

import pegainfer_core
from fastapi import APIRouter
from fastapi.routing import APIRoute
from pegainfer_core.messages import EngineInfo
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from pegainfer_server import web_ui
from pegainfer_server.http_errors import ApiError
from pegainfer_server.metrics import ServerMetrics
from pegainfer_server.openapi import OF_BODIES, error_docs
from pegainfer_server.state import ServerState


def served_name(state: ServerState, asked: str | None) -> str:
    """The model name that answers carry: the one asked for, or the primary. Raises ApiError (404) for any other."""
    if asked is None:
        return state.model_names[0]
    if asked not in state.model_names:
        names = ", ".join(state.model_names)
        raise ApiError(
            404, f"the model {asked[:200]!r} does not exist; served: {names}", code="model_not_found", param="model"
        )
    return asked


def router(state: ServerState, metrics: ServerMetrics) -> APIRouter:
    """The routes, for `create_app`."""
    routes = APIRouter()

    @routes.get("/", responses={200: {"content": {"application/json": {}, "text/html": {}}}})
    async def get_root(request: Request) -> Response:
        """The web page for browsers; for whoever only probes that a server is there, what it is."""
        if state.ui and web_ui.wants_html(request.headers):
            return web_ui.respond(web_ui.INDEX, request)
        return JSONResponse({"name": "pegainfer", "version": pegainfer_core.__version__})

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        """Prometheus text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/version")
    async def get_version() -> Response:
        """The version of pegainfer."""
        return JSONResponse({"version": pegainfer_core.__version__})

    @routes.get("/v1/models", responses={503: error_docs(OF_BODIES["503"])})
    async def get_models() -> Response:
        """The served model, once under each of its names."""
        info, _ = state.serving()
        return JSONResponse({"object": "list", "data": [_card(name, state, info) for name in state.model_names]})

    @routes.get(
        "/v1/models/{name:path}",
        responses={404: error_docs(OF_BODIES["404"]), 503: error_docs(OF_BODIES["503"])},
    )
    async def get_model(name: str) -> Response:
        """One served model."""
        info, _ = state.serving()
        return JSONResponse(_card(served_name(state, name), state, info))

    for route in list(routes.routes):  # whoever may ask may ask for the headers alone
        assert isinstance(route, APIRoute)
        routes.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    return routes


def _card(name: str, state: ServerState, info: EngineInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "pegainfer",
        "root": state.model_names[0],
        "max_model_len": info.max_model_len,
    }
