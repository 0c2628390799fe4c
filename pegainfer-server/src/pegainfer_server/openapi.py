"""The generated API description, made true: bodies are read by hand and errors are ours, so FastAPI knows neither by itself.

Owns what /openapi.json says beyond what routes declare. A route that declares a response of its own keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from pegainfer_server.probes import PROBE_PATHS

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
OF_BODIES = {
    "400": "The body is no JSON, or a field is unknown, missing, of the wrong type or out of range.",
    "404": "The model is not served here.",
    "408": "The request's own timeout is over.",
    "413": "The body is too large.",
    "415": "The body is said to be no JSON.",
    "429": "Too many requests wait, or came from this caller; Retry-After says when to come back.",
    "500": "The engine failed this request.",
    "503": "No requests are taken: the model loads, the server shuts down, or the engine ended.",
}
"""Errors of every route that takes a body."""
NO_KEY = "No valid API key."
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def body_docs(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes `model`. A top-level null is the same as leaving the field out."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    schema = _inlined(schema, definitions)
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        if name not in required and field and {"type": "null"} not in field.get("anyOf", []):
            outside = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            schema["properties"][name] = {**outside, "anyOf": [field, {"type": "null"}]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, *, model_names: Sequence[str], needs_key: bool) -> None:
    """Complete what `app` says about itself; call it once, whatever routes are added later."""
    of_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(of_fastapi(), model_names, needs_key)
        assert app.openapi_schema is not None, "FastAPI keeps what it made"
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to do it


def _complete(document: dict[str, Any], model_names: Sequence[str], needs_key: bool) -> None:
    components = document.setdefault("components", {})
    components.setdefault("schemas", {})["Error"] = ERROR
    if needs_key:
        components["securitySchemes"] = SCHEMES
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)  # wrong parameters are a 400 here
            body = operation.get("requestBody")
            if body is not None:
                for status, text in OF_BODIES.items():
                    responses.setdefault(status, error_docs(text))
                fields = body["content"]["application/json"]["schema"].get("properties", {})
                if "model" in fields:
                    fields["model"] = {"enum": [*model_names, None]}
                if "stream" in fields:
                    responses["200"]["content"]["text/event-stream"] = {}
            if needs_key and path not in PROBE_PATHS:
                responses.setdefault("401", error_docs(NO_KEY))
                operation["security"] = [{name: []} for name in SCHEMES]


def error_docs(text: str) -> dict[str, Any]:
    """One entry of a route's `responses` whose body is an error object."""
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if isinstance(node, dict):
        if "$ref" in node:
            return _inlined(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
        return {key: _inlined(value, definitions) for key, value in node.items()}
    return node
