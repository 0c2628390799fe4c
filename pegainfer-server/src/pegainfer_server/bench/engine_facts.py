"""What an endpoint says about itself: version and served model. Asked once, before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from pegainfer_core.errors import PegainferError

from pegainfer_server.bench.client import Endpoint

SECONDS = 10.0
HIDDEN = ("created", "permission", "parent", "object")
"""Keys of a model card that say nothing about the model."""


def ask(endpoint: Endpoint) -> dict[str, Any]:
    """Version and card of the model. Raises PegainferError if the endpoint does not answer or does not serve the model."""
    headers = {} if endpoint.api_key is None else {"Authorization": f"Bearer {endpoint.api_key}"}
    try:
        with httpx.Client(base_url=endpoint.root, headers=headers, timeout=SECONDS) as http:
            cards = http.get("/v1/models").raise_for_status().json()["data"]
            version = http.get("/version")
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise PegainferError(f"{endpoint.name}: {endpoint.url} does not answer /v1/models: {error!r}") from error
    card = next((card for card in cards if card.get("id") == endpoint.model), None)
    if card is None:
        names = ", ".join(repr(card.get("id")) for card in cards)
        raise PegainferError(f"{endpoint.name}: does not serve {endpoint.model!r}; it serves {names}")
    facts = {name: _short(value) for name, value in card.items() if name not in HIDDEN}
    return {"version": _version(version), "model": facts}


def only_model(endpoint_url: str, api_key: str | None = None) -> str:
    """The first model that an endpoint serves. Raises PegainferError."""
    probe = Endpoint("endpoint", endpoint_url, "", api_key)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        answer = httpx.get(f"{probe.root}/v1/models", headers=headers, timeout=SECONDS).raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise PegainferError(f"{endpoint_url} does not say what it serves: {error!r}; give --model") from error


def _version(answer: httpx.Response) -> str | None:
    try:
        return str(answer.json()["version"]) if answer.status_code == httpx.codes.OK else None
    except (ValueError, LookupError, TypeError):
        return None


def _short(value: Any) -> Any:
    """A path by its last part."""
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value
