"""Snapshots of recurrent state: which slot holds the state after which prefix, and where taking one is worth it.

Owns the slots' index, its eviction order and the policy. Knows nothing of tensors, nor of pages but their size. Plans run in order, each
restoring before its step and saving after it: so a snapshot that a plan found is still there when it is restored, although its slot may be
given to another prefix later in the same plan. What a launched plan will save is pinned until that plan is committed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from pegainfer_core.messages import SnapshotStats
from pegainfer_core.request import Request

GENERATION_PROMPT_TOKENS = 8
"""The last tokens of a prompt that the next turn of a chat may write otherwise: the header of the answer, an empty thinking part."""


class SnapshotPool:
    """Slots by the digest of the prefix whose state they hold, evicted least recently used first.

    Spare ones may never be asked for: they take a quarter of the slots at most, until they are restored for the first time.
    """

    def __init__(self, num_slots: int, bytes_per_slot: int = 0) -> None:
        self.num_slots = num_slots
        self.bytes_per_slot = bytes_per_slot
        self.num_saved = 0
        """Snapshots published so far."""
        self.num_evicted = 0
        self._blank = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._spares: OrderedDict[bytes, None] = OrderedDict()
        """The spare ones among them."""
        self._reserved: dict[int, tuple[bytes | None, bool]] = {}
        """Slots that a launched plan saves to: the digest, where it is known already, and whether it is spare."""

    @property
    def num_held(self) -> int:
        """Slots that hold a snapshot."""
        return len(self._slot_of)

    def has(self, digest: bytes) -> bool:
        """Whether the state after this prefix can be restored."""
        return digest in self._slot_of

    def expects(self, digest: bytes) -> bool:
        """Whether it can be, or a launched plan saves it."""
        return digest in self._slot_of or any(digest == coming for coming, _ in self._reserved.values())

    def restore(self, digest: bytes) -> int:
        """The slot of a snapshot that is there."""
        self._slot_of.move_to_end(digest)
        self._spares.pop(digest, None)
        return self._slot_of[digest]

    def reserve(self, digest: bytes | None, *, spare: bool = False, instead_of: bytes | None = None) -> int | None:
        """A slot to save to, or None if the snapshot exists already or there is no room for it.

        A digest of None is not known yet. `instead_of` is a snapshot that this one makes superfluous, if it is still a spare one.
        """
        if digest is not None and self.expects(digest):
            return None
        if instead_of is not None and instead_of in self._spares:
            slot = self._forget(instead_of)
        elif spare and self._num_spares >= self.num_slots // 4:
            if not self._spares:
                return None
            slot = self._evict(next(iter(self._spares)))
        elif self._blank:
            slot = self._blank.pop()
        elif self._slot_of:
            slot = self._evict(next(iter(self._slot_of)))
        else:
            return None
        self._reserved[slot] = digest, spare
        return slot

    def publish(self, slot: int, digest: bytes) -> None:
        """A reserved slot now holds the state after this prefix. If another one does, that one stays."""
        _, spare = self._reserved.pop(slot)
        if digest in self._slot_of:
            self._blank.append(slot)
            return
        self._slot_of[digest] = slot
        self.num_saved += 1
        if spare:
            self._spares[digest] = None

    def cancel(self, slot: int) -> None:
        """What was saved to a reserved slot is void."""
        del self._reserved[slot]
        self._blank.append(slot)

    def drop(self, digest: bytes) -> None:
        """Forget a snapshot, if it is there."""
        if digest in self._slot_of:
            self._blank.append(self._forget(digest))

    @property
    def _num_spares(self) -> int:
        return len(self._spares) + sum(spare for _, spare in self._reserved.values())

    def _evict(self, digest: bytes) -> int:
        self.num_evicted += 1
        return self._forget(digest)

    def _forget(self, digest: bytes) -> int:
        self._spares.pop(digest, None)
        return self._slot_of.pop(digest)


class Snapshots:
    """Where requests stop to be saved.

    A snapshot is worth its memory, and the shorter row, if it saves `stride` tokens over the one before it. Candidates are the end of the
    prompt, where the next turn of a chat goes on; the end of what another request had in common, as its pages tell; multiples of the stride
    where a row ends anyway; and while tokens are generated, the newest multiple of the stride, a spare one: of no use to a chat whose
    template drops the thinking.
    """

    def __init__(
        self, pool: SnapshotPool, page_size: int, stride: int, digest: Callable[[Request, int], bytes]
    ) -> None:
        """`digest(request, boundary)` names the request's tokens before `boundary`, a multiple of `page_size`; so is `stride`."""
        self.pool = pool
        self.num_lookups = 0
        """Admissions that could have begun from a snapshot."""
        self.num_hits = 0
        """Those that did."""
        self._page_size = page_size
        self._stride = stride
        self._digest = digest

    def begin(self, request: Request, num_cached: int, num_shared: int) -> None:
        """A request starts at `num_cached`; the pages of its first `num_shared` tokens were there."""
        request.snapshot_marks = []
        request.snapshot_end = num_cached
        request.restored_from = None
        request.rolling_snapshot = None
        if request.wants_prompt_logprobs:
            return
        self.num_lookups += 1
        if num_cached:
            self.num_hits += 1
            request.restored_from = self.pool.restore(self._digest(request, num_cached))
        end = (request.num_known - GENERATION_PROMPT_TOKENS) // self._page_size * self._page_size
        last = num_cached
        for mark in (num_shared, end):
            if self.pool.num_slots and mark - last >= self._stride:
                request.snapshot_marks.append(mark)
                last = mark

    def row_end(self, request: Request, end: int) -> int:
        """Where a row that could go to `end` should stop."""
        start = request.num_computed
        for mark in request.snapshot_marks:
            if start < mark < end and not self.pool.expects(self._digest(request, mark)):
                return mark
        if self.pool.num_slots and end < request.num_known:
            # the budget cuts the prompt here: a multiple of the stride is as good, if it is near
            stop = end // self._stride * self._stride
            if 4 * (stop - start) >= 3 * (end - start):
                return stop
        return end

    def reserve(self, request: Request, end: int) -> int | None:
        """The slot to save to after a row that ends at `end`, or None if that is not worth it."""
        if request.wants_prompt_logprobs:
            return None
        if end not in request.snapshot_marks and (end % self._stride or end - request.snapshot_end < self._stride):
            return None
        request.snapshot_end = end
        digest = self._digest(request, end) if end <= request.num_known else None
        spare = end > request.num_prompt
        return self.pool.reserve(digest, spare=spare, instead_of=request.rolling_snapshot if spare else None)

    def publish(self, request: Request, end: int, slot: int) -> None:
        """The state after `end` tokens was saved, and those tokens are known now."""
        digest = self._digest(request, end)
        self.pool.publish(slot, digest)
        if end > request.num_prompt:
            request.rolling_snapshot = digest

    def stats(self) -> SnapshotStats:
        """Gauges and running totals."""
        pool = self.pool
        return SnapshotStats(
            num_held=pool.num_held,
            num_slots=pool.num_slots,
            bytes_held=pool.num_held * pool.bytes_per_slot,
            num_lookups=self.num_lookups,
            num_hits=self.num_hits,
            num_saved=pool.num_saved,
            num_evicted=pool.num_evicted,
        )
