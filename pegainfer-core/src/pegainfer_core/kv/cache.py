"""Pages of requests: growing a page table, finding a cached prefix, giving everything back.

Owns the rules that tie requests to pages. Knows nothing of tensors or of who runs next. Invariant: a request's pages cover exactly the
positions it has been planned to write, and only pages full of committed, computed tokens are registered.
"""

from __future__ import annotations

from pegainfer_core.kv.pages import PagePool, page_hashes, root_hash
from pegainfer_core.request import Request


class KVCache:
    """One pool of pages under all layers; every layer of a model uses the same page table."""

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool = True) -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.prefix_cache = prefix_cache

    @property
    def num_token_capacity(self) -> int:
        """Tokens that fit when one request has the whole pool."""
        return self.pool.num_usable * self.page_size

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def match(self, request: Request) -> list[int]:
        """Cached pages of the longest known prefix; never the last token, whose logits are needed. Acquires nothing."""
        if not self.prefix_cache or request.wants_prompt_logprobs:
            return []
        count = (request.num_known - 1) // self.page_size
        return self.pool.find(self._hashes(request, count))

    def attach(self, request: Request, pages: list[int]) -> None:
        """Start a request on matched pages: their tokens count as computed."""
        assert not request.pages and request.num_computed == 0
        self.pool.acquire(pages)
        request.pages = list(pages)
        request.num_registered_pages = len(pages)
        request.num_computed = len(pages) * self.page_size

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Grow the page table to cover `num_tokens` tokens; returns the new pages, or None and no change if the pool is dry."""
        missing = self.num_pages_for(num_tokens) - len(request.pages)
        if missing <= 0:
            return []
        pages = self.pool.allocate(missing)
        if pages is not None:
            request.pages.extend(pages)
        return pages

    def commit(self, request: Request, num_written: int) -> None:
        """Register the pages that are now full of written tokens, up to position `num_written`."""
        if not self.prefix_cache:
            return
        first, count = request.num_registered_pages, num_written // self.page_size
        if count > first:
            hashes = self._hashes(request, count)
            for index in range(first, count):
                self.pool.register(request.pages[index], hashes[index])
            request.num_registered_pages = count

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
