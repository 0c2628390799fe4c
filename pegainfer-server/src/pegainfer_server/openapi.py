"""Request bodies in the generated API description: bodies are read by hand, so FastAPI does not see them by itself."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def body_docs(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes `model`."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, definitions)}}}
    }


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if isinstance(node, dict):
        if "$ref" in node:
            return _inlined(definitions[node["$ref"].rsplit("/", 1)[1]], definitions)
        return {key: _inlined(value, definitions) for key, value in node.items()}
    return node
