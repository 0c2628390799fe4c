"""Health, readiness, models, version, API keys, request ids, plugin routes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pegainfer_core
import pluggy
import pytest
from fastapi import FastAPI
from pegainfer_core.client import EngineClient
from pegainfer_core.messages import LoadProgress
from pegainfer_server import hookspecs

Serve = Callable[..., Awaitable[Any]]
hookimpl = pluggy.HookimplMarker("pegainfer")
API_ROUTES = [
    ("POST", "/v1/completions", {"prompt": "a"}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/responses", {"input": "a"}),
    ("POST", "/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [300]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/tiny", None),
]


async def test_health_while_loading(serve: Serve) -> None:
    served = await serve(ready=False, tokenizer=None)
    for progress in (LoadProgress("weights", 3, 10), LoadProgress("warm-up", 0, 1)):
        served.engine.dispatch(progress)
        response = await served.http.get("/health")
        assert response.status_code == 503
        assert response.json() == {
            "status": "loading",
            "phase": progress.phase,
            "done": progress.done,
            "total": progress.total,
        }
    await served.engine.start()
    assert (await served.http.get("/health")).status_code == 503  # the tokenizer is still missing
    served.state.tokenizer = served.tokenizer
    response = await served.http.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_health_before_any_progress(serve: Serve) -> None:
    served = await serve(ready=False)
    response = await served.http.get("/health")
    assert response.status_code == 503 and response.json()["status"] == "loading"


async def test_health_of_a_dead_engine(served: Any) -> None:
    served.engine.died("out of memory")
    response = await served.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "dead", "error": "out of memory"})


async def test_draining(served: Any) -> None:
    served.state.draining = True
    response = await served.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "draining", "open": 0})
    error = await served.refused("/v1/completions", {"prompt": "a"}, 503)
    assert error["code"] == "shutting_down"


@pytest.mark.parametrize(("method", "path", "body"), API_ROUTES)
async def test_routes_before_the_model_is_ready(serve: Serve, method: str, path: str, body: Any) -> None:
    served = await serve(ready=False)
    response = await served.http.request(method, path, json=body)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "loading"
    assert response.headers["retry-after"] == "1"


async def test_metrics_and_version_before_the_model_is_ready(serve: Serve) -> None:
    served = await serve(ready=False, tokenizer=None)
    assert (await served.http.get("/metrics")).status_code == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", (await served.http.get("/version")).json()["version"])


async def test_models(served: Any) -> None:
    data = (await served.http.get("/v1/models")).json()
    assert data["object"] == "list"
    assert [card["id"] for card in data["data"]] == ["tiny", "alias"]
    for card in data["data"]:
        assert card["object"] == "model" and card["owned_by"] == "pegainfer" and card["max_model_len"] == 128
        assert isinstance(card["created"], int)
        assert (await served.http.get(f"/v1/models/{card['id']}")).json() == card
    response = await served.http.get("/v1/models/no/such")
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"


# API keys


@pytest.mark.parametrize(
    "header",
    [None, "Bearer", "Bearer wrong", "Bearer ", "Bearer \xe9", "Basic first", "first", "Bearer first second"],
)
async def test_every_route_needs_a_key(serve: Serve, header: str | None) -> None:
    served = await serve(api_keys=("first", "second"))
    headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
    routes = [*API_ROUTES, ("GET", "/metrics", None), ("GET", "/version", None), ("GET", "/nope", None)]
    routes += [("GET", "/docs", None), ("GET", "/openapi.json", None)]
    for method, path, body in routes:
        response = await served.http.request(method, path, json=body, headers=headers)
        assert response.status_code == 401, path
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    assert served.engine.received == []
    assert (await served.http.get("/health")).status_code == 200


@pytest.mark.parametrize("key", ["first", "second"])
async def test_any_key_opens(serve: Serve, key: str) -> None:
    served = await serve(api_keys=("first", "second"))
    for method, path, body in [*API_ROUTES, ("GET", "/metrics", None)]:
        response = await served.http.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200, path


async def test_websockets_of_plugins_need_a_key_too(serve: Serve) -> None:
    served = await serve(api_keys=("first",))
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await served.app({"type": "websocket", "path": "/x", "headers": [], "query_string": b""}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


# request ids


async def test_request_id_is_echoed_or_made_up(served: Any) -> None:
    for path in ("/health", "/nope", "/v1/models"):
        response = await served.http.get(path, headers={"X-Request-Id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
    response = await served.http.post(
        "/v1/completions", json={"prompt": "a", "stream": True}, headers={"X-Request-Id": "s"}
    )
    assert response.headers["x-request-id"] == "s"
    ids = {(await served.http.get("/health")).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    response = await served.http.get("/health", headers={"X-Request-Id": "x" * 129})
    assert response.headers["x-request-id"] != "x" * 129


async def test_the_same_request_id_twice_is_two_requests(served: Any) -> None:
    for _ in range(2):
        await served.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "same"})
    first, second = (request.request_id for request in served.engine.requests)
    assert first != second


# plugins


async def test_plugins_add_routes(serve: Serve) -> None:
    class Plugin:
        @hookimpl
        def pegainfer_add_routes(self, app: FastAPI, client: EngineClient) -> None:
            @app.get("/plugin")
            def plugin() -> dict[str, str]:
                return {"state": client.state}

    manager = pluggy.PluginManager("pegainfer")
    manager.add_hookspecs(hookspecs)
    manager.register(Plugin())
    manager.check_pending()
    served = await serve(
        api_keys=("key",),
        add_routes=lambda app, client: manager.hook.pegainfer_add_routes(app=app, client=client),
    )
    assert (await served.http.get("/plugin")).status_code == 401
    response = await served.http.get("/plugin", headers={"Authorization": "Bearer key"})
    assert response.json() == {"state": "ready"}


async def test_validation_of_plugin_routes_has_the_same_error_shape(serve: Serve) -> None:
    def add_routes(app: FastAPI, _: EngineClient) -> None:
        @app.get("/plugin")
        def plugin(count: int) -> int:
            return count

    served = await serve(add_routes=add_routes)
    response: httpx.Response = await served.http.get("/plugin?count=x")
    assert response.status_code == 400 and response.json()["error"]["param"] == "count"


# documentation of the API, and the process


async def test_openapi_describes_the_bodies(served: Any) -> None:
    paths = (await served.http.get("/openapi.json")).json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["additionalProperties"] is False and schema["properties"]
        assert "$ref" not in str(schema)


def test_the_process_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, pegainfer_server.app; "
        "print(sorted({'torch', 'transformers', 'triton', 'numpy'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/version", "/v1/models", "/v1/models/tiny"])
async def test_headers_alone_may_be_asked_for(served: Any, path: str) -> None:
    whole = await served.http.get(path)
    assert whole.status_code == 200
    assert (await served.http.head(path)).status_code == 200
    assert (await served.http.head("/v1/models/other")).status_code == 404


async def test_the_root_says_what_this_is(served: Any) -> None:
    assert (await served.http.get("/")).json() == {"name": "pegainfer", "version": pegainfer_core.__version__}
