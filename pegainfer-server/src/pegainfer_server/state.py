"""What every route needs: the engine client, the text tools, and what the operator chose.

Owns `ServerState`. The server's lifecycle fills it in; routes only read it. Knows nothing of HTTP requests.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pegainfer_core.chat_events import ReasoningField
from pegainfer_core.client import EngineClient
from pegainfer_core.errors import EngineDeadError
from pegainfer_core.messages import EngineInfo

from pegainfer_server.http_errors import ApiError
from pegainfer_server.liveness import DEFAULT_STALL_TIMEOUT, Liveness
from pegainfer_server.request_times import ObserveRequest

if TYPE_CHECKING:
    from pegainfer_core.chat import ChatFormat
    from pegainfer_core.tokenizer import Tokenizer

DEFAULT_MAX_BODY_BYTES = 32 * 2**20


@dataclasses.dataclass(slots=True, kw_only=True)
class ServerState:
    """One served model. Mutable where the start fills it in: the port is bound before the tokenizer and the engine are ready."""

    client: EngineClient
    model_names: tuple[str, ...]
    """Served model names; the first is the primary one, used where a request names none and as metrics label."""
    tokenizer: Tokenizer | None = None
    """None until loaded. Set it last: routes take it as the sign that `chat_format` is final too."""
    chat_format: ChatFormat | None = None
    """None after loading means that the checkpoint has no chat template."""
    default_sampling: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    """What a request gets where it says nothing; see `sampling.defaults_from_generation_config`."""
    reasoning_field: ReasoningField = "reasoning_content"
    """Under which name chat completions tell thinking."""
    api_keys: tuple[str, ...] = ()
    """Any of these opens the routes; empty: no key is needed."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may call this server (CORS); "*" is all of them, empty none."""
    requests_per_minute: int = 0
    """Most POST requests of each key or, without keys, of each client address; 0: no limit."""
    log_prompts: bool = False
    """Whether request bodies are written to the log."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    prefix_cache: bool = True
    """Whether the engine's prefix cache is on; its counters are left out of /metrics when it is not."""
    ui: bool = True
    """Whether browsers get the web page at /."""
    draining: bool = False
    """Set on shutdown: /health turns 503 and new requests are refused while live ones finish."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    """Unix time of the start; what /v1/models reports."""
    trust_request_chat_template: bool = False
    """Whether a request may bring its own chat template."""
    on_request: list[ObserveRequest] = dataclasses.field(default_factory=list)
    """Called with each engine request when it has ended."""
    stall_timeout: float = DEFAULT_STALL_TIMEOUT
    """Seconds without a step after which an engine with open requests is not alive; 0: never."""
    liveness: Liveness = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Begin to watch the engine."""
        self.liveness = Liveness(self.client, self.stall_timeout)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.client.state == "ready" and self.tokenizer is not None and not self.draining

    def serving(self) -> tuple[EngineInfo, Tokenizer]:
        """The engine's facts and the tokenizer. Raises ApiError (503) unless requests are taken."""
        if self.client.state in ("dead", "closed"):
            raise EngineDeadError(self.client.death or "the engine was closed")
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self.client.info is None or self.tokenizer is None:
            raise ApiError(
                503, "the model is still loading; /health tells how far", code="loading", headers={"Retry-After": "1"}
            )
        return self.client.info, self.tokenizer
