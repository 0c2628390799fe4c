"""Every error a user or a client can cause, as one small tree.

Owns the exception types and the wire codes of rejections. Knows nothing of HTTP status codes: the server maps
`RequestError.code` to a status. Own bugs are `assert`s, never one of these.
"""

from __future__ import annotations

from typing import Literal

RejectionCode = Literal[
    "invalid_request",  # a value that can never be right: out of range, wrong length
    "context_length_exceeded",  # prompt (plus max_tokens) does not fit the served context
    "kv_budget_exceeded",  # could never fit the page pool, even alone
    "invalid_grammar",  # a grammar or schema that cannot be compiled
    "queue_full",  # too many waiting requests; try again later
]


class PegainferError(Exception):
    """Base of everything pegainfer raises on purpose."""


class ConfigError(PegainferError):
    """A flag, an option or a config.json value that cannot be honoured. Ends the start with a one-line message."""


class UnsupportedModelError(ConfigError):
    """No installed family serves the checkpoint, or more than one claims it."""


class CheckpointError(ConfigError):
    """Files are missing, unreadable, or their tensors differ from what the family declared."""


class PluginError(PegainferError):
    """A plugin that could not be loaded or that broke its contract."""


class RequestError(PegainferError):
    """A request that was refused before any work was done for it."""

    def __init__(self, message: str, code: RejectionCode = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code: RejectionCode = code
        self.param = param


class EngineDeadError(PegainferError):
    """The engine ended; every open request fails with this and no new one is taken."""
