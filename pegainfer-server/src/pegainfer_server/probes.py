"""The routes that machines poll: readiness, liveness, and /health, which was there before the two were told apart.

Owns what each means. Ready: requests are taken. Alive: nothing is wrong that a restart would cure; loading, draining and busy servers are
alive. All of them need no API key and tell nothing about requests.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from pegainfer_server.state import ServerState

READY_PATHS = ("/health", "/health/ready", "/readyz", "/ping")
LIVE_PATHS = ("/health/live", "/livez")
PROBE_PATHS = frozenset({*READY_PATHS, *LIVE_PATHS})


def readiness(state: ServerState) -> tuple[int, dict[str, Any]]:
    """Status and body of /readyz and /health: 200 only while requests are taken and the engine makes progress."""
    alive, body = liveness(state)
    if alive != 200:
        return alive, body
    client = state.client
    if state.draining:
        return 503, {"status": "draining", "open": client.num_open}
    if state.ready:
        return 200, {"status": "ok"}
    progress = client.progress
    if client.state == "ready":
        return 503, {"status": "loading", "phase": "tokenizer", "done": 0, "total": 1}
    if progress is None:
        return 503, {"status": "loading", "phase": "start", "done": 0, "total": 1}
    return 503, {"status": "loading", "phase": progress.phase, "done": progress.done, "total": progress.total}


def liveness(state: ServerState) -> tuple[int, dict[str, Any]]:
    """Status and body of /livez: 503 if the engine is dead or has stalled, else 200."""
    client = state.client
    if client.state in ("dead", "closed"):
        return 503, {"status": "dead", "error": client.death or "the engine was closed"}
    quiet = state.liveness.stalled_for()
    if quiet is not None:
        return 503, {"status": "stalled", "seconds_since_step": round(quiet, 1), "open": client.num_open}
    return 200, {"status": "alive"}


def router(state: ServerState) -> APIRouter:
    """The routes, for `create_app`."""
    routes = APIRouter()

    async def get_readiness() -> Response:
        """Are requests taken? 503 with how far the start is, that the server drains, or what is wrong with the engine."""
        status, body = readiness(state)
        return JSONResponse(body, status)

    async def get_liveness() -> Response:
        """Is the engine alive and, if it has work, making progress?"""
        status, body = liveness(state)
        return JSONResponse(body, status)

    for paths, endpoint in ((READY_PATHS, get_readiness), (LIVE_PATHS, get_liveness)):
        for path in paths:
            name = f"{endpoint.__name__}{path.replace('/', '_')}"
            routes.add_api_route(path, endpoint, operation_id=name, responses={503: {"description": "No."}})
            routes.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
    return routes
