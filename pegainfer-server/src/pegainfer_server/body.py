"""A request's body: its size, its JSON, and the model it must fit.

Owns the step from bytes to a validated pydantic model, with errors that name the field. Knows nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError
from starlette.requests import Request

from pegainfer_server.http_errors import ApiError, bad_request
from pegainfer_server.prompts import off_loop


class StrictBody(BaseModel):
    """Base of all bodies and of their parts: unknown fields, other types and non-finite numbers are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    _num_bytes: int = PrivateAttr(0)

    @property
    def num_bytes(self) -> int:
        """Size of the JSON that this was read from: what says whether work on it may hold up the event loop."""
        return self._num_bytes

    def set_num_bytes(self, size: int) -> None:
        """Called once, by whoever read it."""
        self._num_bytes = size


Body = TypeVar("Body", bound=StrictBody)

JSON_TYPE = "application/json"
MAX_DEPTH = 128
"""Objects and lists inside each other. A JSON schema has two for each level that it describes."""
BYTES_READ_PER_CHARACTER = 32
"""JSON is read so many times faster than text is tokenized, which is what `off_loop` counts in."""
_MAX_SHOWN = 60  # characters of a wrong value that an error repeats


async def read_body(request: Request, model: type[Body], max_bytes: int) -> Body:
    """The request's body as `model`. Raises ApiError: 413 too large, 415 said to be no JSON, 400 anything else."""
    content_type = request.headers.get("content-type", JSON_TYPE).partition(";")[0].strip().lower()
    if content_type != JSON_TYPE:
        raise ApiError(
            415,
            f"the body must be JSON: Content-Type {JSON_TYPE}, not {content_type[:100]!r}",
            code="unsupported_media_type",
        )
    raw = await _read_bytes(request, max_bytes)
    return await off_loop(len(raw) // BYTES_READ_PER_CHARACTER, lambda: parse_body(raw, model))


def parse_body(raw: bytes, model: type[Body]) -> Body:
    """`raw` as `model`. A top-level null is the same as leaving the field out, as in the OpenAI API."""
    try:
        data = msgspec.json.decode(raw)  # strict: NaN, Infinity, 1e999, broken UTF-8 and lone surrogates are errors
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is not valid JSON: nested too deep", code="invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    brackets = raw.count(b"[") + raw.count(b"{")  # at a glance: no more levels than these; a long prompt of ids has few
    if brackets > MAX_DEPTH and _is_deeper_than(data, MAX_DEPTH):
        raise bad_request(f"the body is nested too deep: at most {MAX_DEPTH} levels are taken", code="invalid_json")
    body = validated({name: value for name, value in data.items() if value is not None}, model)
    body.set_num_bytes(len(raw))
    return body


def validated(fields: Mapping[str, Any], model: type[Body]) -> Body:
    """`fields` as `model`. Raises ApiError (400) naming the first that is wrong."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from None


def _is_deeper_than(value: Any, levels: int) -> bool:
    """Level by level, because recursion would be what the limit is there to prevent."""
    containers = [value]
    for _ in range(levels):
        containers = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]
        if not containers:
            return False
    return True


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def _invalid(error: ValidationError) -> ApiError:
    first: Any = error.errors(include_url=False, include_context=False)[0]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        return bad_request(f"{name}: this server does not support this field", name, code="unsupported_field")
    if first["type"] == "missing":
        return bad_request(f"{name}: this field is required", name, code="missing_field")
    reason = first["msg"].removeprefix("Value error, ")
    return bad_request(
        f"{name}: {reason[:1].lower()}{reason[1:]}, got {_shown(first['input'])}", name, code="invalid_value"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
