"""A chat template that came with a request, rendered where it can do no harm: in a process of its own, with limits.

Owns the parent's side; `template_process` is the child. The sandbox keeps a template from Python's internals; only a process with limits
keeps it from eating time and memory, for which an expression is enough. Nothing is compiled here, because that evaluates constants.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from pegainfer_core.chat_template import ChatTemplate
from pegainfer_core.errors import RequestError

SECONDS = 5.0
"""For the start of the process and the rendering together."""
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "SYSTEMROOT")
"""What the child sees of the environment, which may hold keys."""
PARAM = "chat_template"


class IsolatedTemplate(ChatTemplate):
    """See the module docstring."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises RequestError for a template that is no jinja, or too expensive to compile."""
        self.source = source
        facts = _ask({"source": source, "special_tokens": dict(special_tokens)})
        self.variables = frozenset(facts["variables"])
        self._wants_parts = facts["wants_parts"]

    def render(self, variables: Mapping[str, Any]) -> str:
        """See ChatTemplate. Raises RequestError."""
        text: str = _ask({"source": self.source, "variables": dict(variables)})["text"]
        return text


def _ask(question: dict[str, Any]) -> dict[str, Any]:
    environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pegainfer_core.template_process"],
            input=msgspec.json.encode(question),
            capture_output=True,
            timeout=SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RequestError(f"chat_template: takes longer than {SECONDS:g} s", param=PARAM) from None
    try:
        answer: dict[str, Any] = msgspec.json.decode(done.stdout)
    except msgspec.DecodeError:  # it was ended, by a limit
        raise RequestError("chat_template: takes too much time or memory", param=PARAM) from None
    if "error" in answer:
        raise RequestError(f"chat_template: {answer['error']}", param=PARAM)
    return answer
