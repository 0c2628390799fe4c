"""What a start leaves behind is gone, and what stays is looked at no more."""

from __future__ import annotations

import subprocess
import sys


def test_settling() -> None:
    code = """
import gc, weakref
from pegainfer_core.settling import settle
class Node: pass
gc.disable()
node = Node(); node.itself = node
gone, kept = weakref.ref(node), Node()
del node
assert gone() is not None
settle()
assert gone() is None and gc.isenabled() and gc.get_freeze_count() > 0
assert not any(found is kept for found in gc.get_objects())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
