"""The wire between a client and an engine: every message that crosses it, in both directions.

Owns the types, and how ids are packed. They are the same whether the engine is in this process or another one. No dict
protocols, no pickle; msgspec tags each message with its class name.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pegainfer_core.errors import RejectionCode
from pegainfer_core.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error", "rejected"]

if TYPE_CHECKING:
    TokenIds = Sequence[int]
else:
    TokenIds = array
    """Token ids that cross the wire as bytes, 4 each: 16,384 of them cost as much as a few. See `pack_ids`."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Raw log-softmax value of one token and of the most likely ones at its position."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top: list[tuple[int, float]]
    """(token id, logprob), most likely first, ties by id; as many as were asked for."""


# client -> engine


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Take this request. It ends exactly once, with a `RequestOutput` that has a finish reason."""

    request_id: str
    """Unique among open requests of this client."""
    prompt_ids: TokenIds
    params: SamplingParams
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = 0
    """Lower runs first; equal priorities run in order of arrival."""


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Stop computing these. Unknown or finished ids are ignored; an abort is an end too (reason abort)."""

    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Abort what is open and end the engine process with exit code 0."""


ToEngine = AddRequest | AbortRequests | Shutdown


def pack_ids(token_ids: Sequence[int]) -> array[int]:
    """Ids as the wire takes them best (a list crosses it too). Raises OverflowError for ids that do not fit 32 bits."""
    return array("I", token_ids)


def _packed(value: array[int]) -> memoryview:
    return memoryview(value)


def _unpacked(kind: type[Any], value: bytes | list[int]) -> array[int]:
    del kind  # the only one
    return array("I", value)


TO_ENGINE_ENCODER = msgspec.msgpack.Encoder(enc_hook=_packed)
TO_ENGINE_DECODER: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=_unpacked)


# engine -> client


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step did for one request. At most one per request and step."""

    request_id: str
    token_ids: list[int]
    """New tokens. A stop id or EOS that ended the request is not among them; it counts in `num_output_tokens`."""
    logprobs: list[TokenLogprob] | None
    """Parallel to `token_ids` where logprobs were asked for."""
    prompt_logprobs: list[TokenLogprob | None] | None
    """Once, with the output that ends the prefill; the first entry is None."""
    num_cached_tokens: int | None
    """Once, with the first output: prompt tokens taken from the prefix cache."""
    finish_reason: FinishReason | None
    """Set exactly once, in the request's last output."""
    stop_token_id: int | None
    """The id of `stop_token_ids` that ended it; None for EOS and every other reason."""
    num_output_tokens: int
    """Tokens sampled so far, the stopping one included: what usage reports."""
    error: str | None
    """For the reasons error and rejected: what happened, fit for the client."""
    rejection: RejectionCode | None
    times: tuple[float, float] | None
    """Once, with the output that ends the prefill: seconds waiting, and from then to that output."""
    rejected_param: str | None = None
    """The request's field that was refused, where one is to blame."""


class SnapshotStats(msgspec.Struct, frozen=True):
    """Gauges and running totals of the snapshots of recurrent state."""

    num_held: int
    num_slots: int
    bytes_held: int
    num_lookups: int
    """Admissions that could have begun from a snapshot."""
    num_hits: int
    """Those that did."""
    num_saved: int
    num_evicted: int


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and running totals, taken before the outputs of the same message are sent."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    """Free or evictable."""
    num_pages: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    """Total prompt tokens of admitted requests."""
    cached_tokens: int = 0
    """Total prompt tokens taken from the prefix cache."""
    generation_tokens: int = 0
    preemptions: int = 0
    snapshots: SnapshotStats | None = None
    """Of recurrent state; None for models without, or without a prefix cache."""

    @property
    def kv_usage(self) -> float:
        """Share of the pages that running requests hold, 0 to 1."""
        return 1.0 - self.num_free_pages / self.num_pages if self.num_pages else 0.0


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """One message per step, for all requests in it."""

    outputs: list[RequestOutput]
    stats: EngineStats
    num_tokens: int
    """Tokens computed by the step."""
    act_seconds: tuple[float, float, float] | None = None
    """Host time of planning, of running (launching, and waiting for the step that is committed) and of committing; None if nothing ran."""


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Where the start stands: a phase ("weights", "kernels", "graphs") and how much of it is done; a total of 0 is unknown."""

    phase: str
    done: int
    total: int


class EngineInfo(msgspec.Struct, frozen=True, tag=True):
    """Sent once, when the engine can take requests. Everything that was `auto` is decided here."""

    family: str
    device: str
    dtype: str
    attention_backend: str
    max_model_len: int
    max_prefill_tokens: int
    max_running_requests: int
    page_size: int
    num_pages: int
    vocab_size: int
    """Ids at or above this are never sampled and refused in prompts."""
    eos_token_ids: list[int]
    weight_bytes: int
    """The parameters in the engine's type, as loaded; a CPU may pack them into other layouts afterwards."""
    kv_cache_bytes: int
    """Of the pages."""
    state_bytes: int
    """Of the recurrent states of running requests and of snapshots."""
    num_snapshots: int
    """Slots for snapshots of recurrent state."""
    timeline: list[tuple[str, float]]
    """(phase, seconds) of the start."""


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine's last message: why it ended."""

    message: str


FromEngine = StepOutputs | LoadProgress | EngineInfo | EngineFailed
