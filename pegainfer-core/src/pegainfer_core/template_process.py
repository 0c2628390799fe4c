"""The process that renders one request's own chat template: `python -m pegainfer_core.template_process`, a question on standard input.

Owns the limits. Asked with special tokens it tells what the template reads; asked with variables it renders. See `isolated_template`.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from pegainfer_core.chat_template import ChatTemplate

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 5
MOST_TEXT = 32 << 20
"""Characters of a rendered prompt; no context takes more."""
MOST_ERROR = 300


def limit() -> None:
    """Bound this process for good, where the system can."""
    try:
        import resource
    except ImportError:  # not on Windows: there the parent's time limit is the only one
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """The template's facts or text, or why there is none."""
    try:
        template = ChatTemplate(question["source"], "the request")
        if "variables" not in question:
            wants_parts = template.wants_parts(question["special_tokens"])
            return {"variables": sorted(template.variables), "wants_parts": wants_parts}
        text = template.render(question["variables"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:MOST_ERROR]}
    if len(text) > MOST_TEXT:
        return {"error": f"renders more than {MOST_TEXT} characters"}
    return {"text": text}


def main() -> None:
    """Answer one question."""
    question = msgspec.json.decode(sys.stdin.buffer.read())
    limit()
    sys.stdout.buffer.write(msgspec.json.encode(answer(question)))


if __name__ == "__main__":
    main()
