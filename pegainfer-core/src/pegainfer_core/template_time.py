"""A time limit for chat templates: each turn of a loop and each call of a macro looks at the clock.

Owns the limit and how it gets into a template. A checkpoint's own template is trusted code, but messages decide how long it runs, and a
template may well look at each message once for each other. Knows nothing of messages.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from jinja2 import TemplateRuntimeError, nodes

SECONDS = 10.0
"""A template of a common kind renders thousands of messages in a tenth of a second."""
CHECK = "_pegainfer_check_time"
"""The global that templates call; as for every name with an underscore in front, no template uses it by chance."""

_running = threading.local()


class TemplateTimeoutError(TemplateRuntimeError):
    """Rendering took too long."""


@contextlib.contextmanager
def time_limit(seconds: float | None = None) -> Iterator[None]:
    """What this thread renders inside has so long; the default is SECONDS."""
    _running.deadline = time.monotonic() + (SECONDS if seconds is None else seconds)
    try:
        yield
    finally:
        del _running.deadline


def check_time() -> str:
    """Nothing to show. Raises TemplateTimeoutError once the limit is over; constants are folded without any."""
    deadline = getattr(_running, "deadline", None)
    if deadline is not None and time.monotonic() > deadline:
        raise TemplateTimeoutError("rendering takes too long")
    return ""


def with_time_checks(template: nodes.Template) -> nodes.Template:
    """The same template, changed in place, with a check at the head of every loop and macro."""
    for node in template.find_all((nodes.For, nodes.Macro)):
        assert isinstance(node, nodes.For | nodes.Macro)
        call = nodes.Call(nodes.Name(CHECK, "load"), [], [], None, None)
        check = nodes.Output([call]).set_lineno(node.lineno, override=True)
        assert template.environment is not None, "a parsed template has one"
        check.set_environment(template.environment)
        node.body.insert(0, check)
    return template
