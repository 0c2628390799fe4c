"""The distinct tokens of a request, and how often each was put out: what its penalties depend on.

Owns the counts, as arrays that grow by one token at a time. Knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """Of one request."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        ids = np.unique(np.asarray([*prompt_ids, *output_ids], dtype=np.int64))
        self._size = len(ids)
        self._ids = np.resize(ids, 2 * self._size + 64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}
        for token_id in output_ids:
            self.add(token_id)

    @property
    def ids(self) -> np.ndarray:
        """int64: every token seen, in prompt or output, once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """float32: how often each of `ids` was put out."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count a token that was put out."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._size
            if place == len(self._ids):
                self._ids, self._counts = np.resize(self._ids, 2 * place), np.resize(self._counts, 2 * place)
            self._ids[place], self._counts[place] = token_id, 0.0
            self._size += 1
        self._counts[place] += 1.0
