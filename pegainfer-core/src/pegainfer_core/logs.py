"""How log records look on stderr, in every process of ours: a line of text, or one JSON object a line.

Owns the two formats and the id of the HTTP request that a record belongs to. Knows nothing of who logs, and never sees prompts or keys
unless a message holds them.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from contextvars import ContextVar
from typing import Any, Literal

LogFormat = Literal["text", "json"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""X-Request-Id of the HTTP request that is being served, where there is one."""

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class TextFormatter(logging.Formatter):
    """Time, level, logger and message; then the request's id in brackets, if there is one."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        text = super().formatMessage(record)
        current = request_id.get()
        return text if current is None else f"{text} [{current}]"


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, request_id and exception where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        current = request_id.get()
        if current is not None:
            fields["request_id"] = current
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure_logging(level: int | str, log_format: LogFormat = "text") -> None:
    """Make stderr the one place that records go to, in this format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
