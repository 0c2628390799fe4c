"""The pool of pages: which are free, who shares one, and which content can be found again by its hash.

Owns reference counts, the hash index and the eviction order. Knows nothing of requests, tensors or tokens beyond
hashing them. Invariant: every page but page 0 is exactly one of blank (no content worth keeping), held (reference count
above 0) or evictable (registered, held by nobody).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

PADDING_PAGE = 0
"""Never handed out: padding rows and unused page-table entries point at it."""


def root_hash(salt: str | None) -> bytes:
    """Parent of a request's first page. Requests with different salts share no page."""
    return hashlib.blake2b(b"-" if salt is None else b"+" + salt.encode(), digest_size=16).digest()


def page_hashes(parent: bytes, token_ids: array[int], page_size: int) -> list[bytes]:
    """128-bit names of full pages in a row: each one's tokens at full width (typecode I), and through `parent` all before them.

    Tokens after the last full page are left out.
    """
    data, size = token_ids.tobytes(), page_size * token_ids.itemsize
    hashes: list[bytes] = []
    for end in range(size, len(data) + 1, size):
        parent = hashlib.blake2b(parent + data[end - size : end], digest_size=16).digest()
        hashes.append(parent)
    return hashes


class PagePool:
    """Pages 1 to num_pages - 1, shared by reference count, found by hash, evicted least recently used first."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "page 0 is padding, so a pool needs two pages"
        self.num_pages = num_pages
        self._blank = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_pages
        self._hash_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}

    @property
    def num_usable(self) -> int:
        """Pages that can hold tokens."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now, those that would evict cached content included."""
        return len(self._blank) + len(self._evictable)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None and no change. Blank pages go first, then the oldest evictable ones."""
        if count > self.num_free:
            return None
        pages: list[int] = []
        for _ in range(count):
            if self._blank:
                page = self._blank.pop()
            else:
                page, _ = self._evictable.popitem(last=False)
                self.forget(page)
            self._references[page] = 1
            pages.append(page)
        return pages

    def acquire(self, pages: Sequence[int]) -> None:
        """Add a reference to pages that are held or evictable."""
        for page in pages:
            if self._references[page] == 0:
                del self._evictable[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference each. The last page goes first, so that a prefix outlives what follows it."""
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} released more often than acquired"
            if self._references[page] == 0:
                if self._hash_of[page] is None:
                    self._blank.append(page)
                else:
                    self._evictable[page] = None

    def register(self, page: int, digest: bytes) -> None:
        """Make a held, fully written page findable. If another page already has this content, that one stays the one found."""
        assert self._references[page] > 0 and self._hash_of[page] is None
        if digest not in self._page_of:
            self._page_of[digest] = page
            self._hash_of[page] = digest

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """The pages with these contents, up to the first that is not there."""
        pages: list[int] = []
        for page in map(self._page_of.get, digests):
            if page is None:
                break
            pages.append(page)
        return pages

    def num_unheld(self, pages: Sequence[int]) -> int:
        """How many of `pages` nobody holds: acquiring them costs that many free pages."""
        return sum(self._references[page] == 0 for page in pages)

    def forget(self, page: int) -> None:
        """Make the page findable no more, if it is."""
        digest = self._hash_of[page]
        if digest is not None:
            del self._page_of[digest]
            self._hash_of[page] = None
