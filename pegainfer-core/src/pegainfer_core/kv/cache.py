"""Pages of requests: growing a page table, finding a cached prefix, giving everything back.

Owns the rules that tie requests to pages, and for models with recurrent state, pages to snapshots of it: a prefix is cached where both
exist. Knows nothing of tensors or of who runs next. Invariant: a request's pages cover exactly the positions it has been planned to write,
and only pages full of committed, computed tokens are registered.
"""

from __future__ import annotations

import dataclasses

from pegainfer_core.kv.pages import PagePool, page_hashes, root_hash
from pegainfer_core.kv.snapshots import SnapshotPool, Snapshots
from pegainfer_core.request import Request


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """What of a request's prefix is cached."""

    pages: list[int]
    """A request can start on these."""
    num_shared_tokens: int
    """Tokens whose pages are there; more than in `pages` where the recurrent state after them was not saved."""


class KVCache:
    """One pool of pages under all layers; every layer of a model uses the same page table."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool = True,
        snapshots: SnapshotPool | None = None,
        snapshot_stride: int = 0,
    ) -> None:
        """`snapshots`, with a stride in tokens, are for models with recurrent state; they need to be there even if none fits."""
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.snapshots: Snapshots | None = None
        """Where the recurrent state of prefixes is, for models that have one."""
        if snapshots is not None and prefix_cache:
            self.snapshots = Snapshots(snapshots, page_size, snapshot_stride, self.digest)

    @property
    def num_token_capacity(self) -> int:
        """Tokens that fit when one request has the whole pool."""
        return self.pool.num_usable * self.page_size

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, request: Request) -> Match:
        """The longest cached prefix; never the last token, whose logits are needed. Acquires nothing."""
        if not self.prefix_cache or request.wants_prompt_logprobs:
            return Match([], 0)
        count = (request.num_known - 1) // self.page_size
        hashes = self._hashes(request, count)
        pages = self.pool.find(hashes)
        usable = len(pages)
        if self.snapshots is not None:
            while usable and not self.snapshots.pool.has(hashes[usable - 1]):
                usable -= 1
        return Match(pages[:usable], len(pages) * self.page_size)

    def attach(self, request: Request, match: Match) -> None:
        """Start a request on matched pages: their tokens count as computed."""
        assert not request.pages and request.num_computed == 0
        self.pool.acquire(match.pages)
        request.pages = list(match.pages)
        request.num_registered_pages = len(match.pages)
        request.num_computed = len(match.pages) * self.page_size
        if self.snapshots is not None:
            self.snapshots.begin(request, request.num_computed, match.num_shared_tokens)

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Grow the page table to cover `num_tokens` tokens; returns the new pages, or None and no change if the pool is dry."""
        missing = self.num_pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return []
        pages = self.pool.allocate(missing)
        if pages is not None:
            request.pages.extend(pages)
        return pages

    def commit(self, request: Request, num_written: int, snapshot: int | None = None) -> None:
        """Register the pages that are now full of written tokens, up to position `num_written`, and the state saved there."""
        if not self.prefix_cache:
            return
        first, count = request.num_registered_pages, num_written // self.page_size
        if count > first:
            hashes = self._hashes(request, count)
            for index in range(first, count):
                self.pool.register(request.pages[index], hashes[index])
            request.num_registered_pages = count
        if snapshot is not None:
            assert self.snapshots is not None
            self.snapshots.publish(request, num_written, snapshot)

    def distrust(self, request: Request) -> None:
        """Make nothing that the request wrote or read findable any more: its numbers were not finite."""
        for page in request.pages:
            self.pool.forget(page)
        if self.snapshots is not None:
            for digest in request.page_hashes:
                self.snapshots.pool.drop(digest)

    def void(self, snapshot: int | None) -> None:
        """What was saved, if anything was, belongs to no commit."""
        if snapshot is not None:
            assert self.snapshots is not None
            self.snapshots.pool.cancel(snapshot)

    def digest(self, request: Request, num_tokens: int) -> bytes:
        """Name of the request's first `num_tokens` tokens, one page of them at least, all known."""
        assert 0 < num_tokens <= request.num_known and num_tokens % self.page_size == 0
        count = num_tokens // self.page_size
        if len(request.page_hashes) < count:
            self._hashes(request, count)
        return request.page_hashes[count - 1]

    def free(self, request: Request) -> None:
        """Give back all pages; registered ones stay findable until they are evicted."""
        self.pool.release(request.pages)
        request.pages = []
        request.num_registered_pages = request.num_planned_pages = request.num_computed = 0

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Hashes of the request's first `count` pages; committed tokens never change, so each is computed once."""
        hashes = request.page_hashes
        if len(hashes) < count:
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            tokens = request.token_ids[len(hashes) * self.page_size : count * self.page_size]
            hashes.extend(page_hashes(parent, tokens, self.page_size))
        return hashes if len(hashes) == count else hashes[:count]
