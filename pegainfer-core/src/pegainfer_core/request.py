"""A request as the scheduler sees it: its tokens, how many are computed, and what it holds.

Owns per-request state. No torch, no text. Counts follow one law: `num_computed` chases `num_known` plus `num_pending`; a request is a
prompt, a decode or a resumed one only by how far it has to go.
"""

from __future__ import annotations

from array import array
from typing import Literal

from pegainfer_core.messages import AddRequest, TokenLogprob
from pegainfer_core.sampling_params import SamplingParams

Status = Literal["waiting", "running", "finished"]


class Request:
    """Mutable; only the scheduler and the KV cache change it."""

    __slots__ = (
        "admitted_at",
        "arrival",
        "arrived_at",
        "cache_salt",
        "epoch",
        "max_tokens",
        "num_cached",
        "num_computed",
        "num_pending",
        "num_planned_pages",
        "num_prompt",
        "num_registered_pages",
        "page_hashes",
        "pages",
        "params",
        "prefilled",
        "priority",
        "prompt_logprobs",
        "request_id",
        "restored_from",
        "rolling_snapshot",
        "seed",
        "slot",
        "snapshot_end",
        "snapshot_marks",
        "status",
        "times",
        "token_ids",
        "wants_prompt_logprobs",
    )

    def __init__(self, message: AddRequest, *, arrival: int, arrived_at: float, seed: int, max_tokens: int) -> None:
        self.request_id = message.request_id
        self.params: SamplingParams = message.params
        self.cache_salt = message.cache_salt
        self.priority = message.priority
        self.arrival = arrival
        """Position in order of arrival: breaks ties of priority."""
        self.seed = seed
        self.max_tokens = max_tokens
        """Resolved: what the context allows, where the client left it open."""
        self.token_ids = array("I", message.prompt_ids)
        """Known tokens: the prompt and every committed output token. Packed: copied and hashed without a loop."""
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        """Positions whose keys and values are written or will be by a launched step."""
        self.num_pending = 0
        """Tokens sampled by launched steps that are not committed yet."""
        self.status: Status = "waiting"
        self.epoch = 0
        """Raised when launched work becomes void (preemption, end); late results of an older epoch are dropped."""
        self.slot = -1
        self.pages: list[int] = []
        self.page_hashes: list[bytes] = []
        self.num_registered_pages = 0
        self.num_planned_pages = 0
        """Pages the runner was told of."""
        self.snapshot_marks: list[int] = []
        """Boundaries at which rows end so that the recurrent state there is saved."""
        self.snapshot_end = 0
        """The last boundary whose state was saved, or is known to be."""
        self.restored_from: int | None = None
        """The snapshot that the request's slot is filled from when it is admitted."""
        self.rolling_snapshot: bytes | None = None
        """Digest of the newest state saved while tokens are generated; it gives way to the next one."""
        self.num_cached: int | None = None
        """Prompt tokens found in the prefix cache at first admission, until they were reported."""
        self.wants_prompt_logprobs = message.params.prompt_logprobs is not None
        """Until they were delivered."""
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.arrived_at = arrived_at
        self.admitted_at: float | None = None
        self.prefilled = False
        """Whether the whole prompt was computed once."""
        self.times: tuple[float, float] | None = None
        """(seconds waiting, seconds in the first prefill), until they were reported."""

    @property
    def num_known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Committed output tokens."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: lower priority value, then earlier arrival."""
        return (self.priority, self.arrival)
