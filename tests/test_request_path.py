"""docs/REQUEST_PATH.md is true: one request is followed through a real engine, and the modules are those of the page."""

from __future__ import annotations

import asyncio
import functools
import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from pegainfer_core.config import EngineConfig
from pegainfer_core.kernel_cache import c_compiler
from pegainfer_core.plugins import load_plugins
from pegainfer_core.resolve import resolve_model
from pegainfer_core.startup import start_engine
from pegainfer_core.thread_client import ThreadClient
from pegainfer_qwen3.testing import write_tiny_qwen3
from pegainfer_server.app import create_app
from pegainfer_server.state import ServerState

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pegainfer_core", "pegainfer_server", "pegainfer_qwen3")


class Recorder:
    """Our modules in the order in which their functions are first entered, by the thread that did so."""

    def __init__(self) -> None:
        self.threads: dict[str, int] = {}
        """Module to thread, in order of first entry."""
        self.recording = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function for `sys.setprofile`."""
        if not self.recording or event != "call" or frame.f_code.co_name == "<module>":
            return
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in PACKAGES:
            self.threads.setdefault(module, threading.get_ident())


def modules_of_the_page() -> list[str]:
    """The modules of the numbered lines: `server/app.py` as pegainfer_server.app."""
    page = (ROOT / "docs" / "REQUEST_PATH.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\d+\. (.*?):", page, flags=re.MULTILINE)
    files = [file for line in lines for file in re.findall(r"`(\w+)/([\w/]+)\.py`", line)]
    return [f"pegainfer_{package}.{path.replace('/', '.')}" for package, path in files]


async def serve_one_request(model: Path, recorder: Recorder) -> str:
    """A streamed chat completion of one token: every module is entered before the answer ends, in a fixed order."""
    config = EngineConfig(model=str(model), kv_cache_memory=1 << 22)
    resolved = resolve_model(config, load_plugins())
    client = ThreadClient(functools.partial(start_engine, config))
    await client.start()
    await client.wait_ready()
    tokenizer = resolved.family.tokenizer(model)
    state = ServerState(
        client=client,
        model_names=("tiny",),
        tokenizer=tokenizer,
        chat_format=resolved.family.chat_format(tokenizer, model),
    )
    message = {"role": "user", "content": "Hello"}
    body = {"messages": [message], "max_tokens": 1, "temperature": 1, "seed": 1, "stream": True}
    transport = httpx.ASGITransport(create_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        recorder.recording = True
        response = await http.post("/v1/chat/completions", json=body)
        recorder.recording = False
    await client.close()
    return response.raise_for_status().text


def test_page_lists_the_modules_in_the_order_of_a_request(tmp_path: Path) -> None:
    model = write_tiny_qwen3(tmp_path / "tiny")
    recorder = Recorder()
    threading.setprofile(recorder)  # the engine's thread starts later
    sys.setprofile(recorder)
    try:
        answer = asyncio.run(serve_one_request(model, recorder))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert answer.endswith("data: [DONE]\n\n")
    page = modules_of_the_page()
    if c_compiler() is None:
        page.remove("pegainfer_core.ops.cpu_native")  # its kernels need one
    assert set(recorder.threads) == set(page)
    assert len(set(recorder.threads.values())) == 2, "the API and the engine"
    # The order between the two threads is not fixed; within each of them it is.
    for thread in set(recorder.threads.values()):
        entered = [module for module, first in recorder.threads.items() if first == thread]
        assert [module for module in page if module in entered] == entered
