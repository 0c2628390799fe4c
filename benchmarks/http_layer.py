"""The HTTP layer alone: one API process over an engine that takes no time (goal P12).

The engine is a client in the API process that answers every request at once with its first token and then gives one token to every
open request each pause. Three loads: arriving (Poisson, paced as a GPU would be, about as many in flight as the concurrency), whose time
to the first token is what HTTP adds; waves (paced, a closed loop, so that all requests come at the same moment); saturated (no pause),
whose tokens/s are what one process can stream. The load client is `pegainfer bench`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from pegainfer_core.client import EngineClient
from pegainfer_core.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    FinishReason,
    RequestOutput,
    StepOutputs,
    ToEngine,
)
from pegainfer_core.testing.fake_client import fake_info
from pegainfer_core.testing.tiny_tokenizer import EOS_ID, VOCAB_SIZE, write_tiny_tokenizer

ASCII_IDS = range(300, VOCAB_SIZE)
"""Merges of the tiny tokenizer: each of them is a piece of a word, so that every token is an event."""
MODEL = "fake"
CONCURRENCY = 64
SHAPE = (128, 128)
PAUSE = 0.01
"""Seconds of a step when paced."""
CASES = {"arriving": PAUSE, "waves": PAUSE, "saturated": 0.0}


class InstantEngine(EngineClient):
    """Repeats prompts: the first token at once, and a token for every open request each `pause` seconds.

    With `hold`, nothing at all before that many requests are open; then all of them are served to their end.
    """

    def __init__(self, pause: float, hold: int = 0) -> None:
        super().__init__()
        self._pause = pause
        self._hold = hold
        self._open: dict[str, tuple[AddRequest, int]] = {}
        self._ticking = False

    async def start(self) -> None:
        """Become ready at once."""
        self.dispatch(fake_info(VOCAB_SIZE, [EOS_ID], max_model_len=4096))

    def send(self, message: ToEngine) -> None:
        """Take a message."""
        if isinstance(message, AddRequest):
            self._open[message.request_id] = (message, 0)
            if not self._hold:
                asyncio.get_running_loop().call_soon(self._advance, [message.request_id])
            if not self._ticking and len(self._open) >= self._hold:
                self._ticking = True
                self._later()
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self._open.pop(request_id, None)

    async def close(self) -> None:
        """End."""
        self._open.clear()
        self.mark_closed()

    def _later(self) -> None:
        asyncio.get_running_loop().call_later(self._pause, self._tick)

    def _tick(self) -> None:
        self._advance(list(self._open))
        if self._open:
            self._later()
        else:
            self._ticking = False

    def _advance(self, request_ids: list[str]) -> None:
        outputs = [self._next(request_id) for request_id in request_ids if request_id in self._open]
        if outputs:
            self.dispatch(StepOutputs(outputs, EngineStats(num_running=len(self._open)), len(outputs)))

    def _next(self, request_id: str) -> RequestOutput:
        request, given = self._open[request_id]
        last = given + 1 == request.params.max_tokens
        if last:
            del self._open[request_id]
        else:
            self._open[request_id] = (request, given + 1)
        reason: FinishReason | None = "length" if last else None
        return RequestOutput(
            request_id=request_id,
            token_ids=[request.prompt_ids[given % len(request.prompt_ids)]],
            logprobs=None,
            prompt_logprobs=None,
            num_cached_tokens=None if given else 0,
            finish_reason=reason,
            stop_token_id=None,
            num_output_tokens=given + 1,
            error=None,
            rejection=None,
            times=None if given else (0.0, 0.0),
        )


async def get_memory() -> dict[str, int]:
    """Living objects and resident bytes, once garbage is collected and the C allocator (glibc's) gave back what is free."""
    import psutil

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {"objects": len(gc.get_objects()), "rss_bytes": int(psutil.Process().memory_info().rss)}


def serve(port: int, pause: float, hold: int = 0) -> None:
    """Serve the instant engine as `pegainfer serve` would serve another, and tell its memory at /memory."""
    import uvicorn
    from pegainfer_core.tokenizer import load_tokenizer
    from pegainfer_server.app import create_app
    from pegainfer_server.state import ServerState

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_tokenizer(Path(folder))
        tokenizer = load_tokenizer(Path(folder))
    engine = InstantEngine(pause, hold)
    app = create_app(ServerState(client=engine, model_names=(MODEL,), tokenizer=tokenizer))
    app.get("/memory")(get_memory)

    async def run() -> None:
        await engine.start()
        config = uvicorn.Config(app, port=port, http="httptools", log_config=None, access_log=False)
        await uvicorn.Server(config).serve()

    import uvloop

    uvloop.run(run())


def measure(case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of one case, with the CPU seconds of the API process."""
    import psutil
    from pegainfer_server.bench.client import Endpoint
    from pegainfer_server.bench.serve_bench import closed_points, open_points, run_points
    from pegainfer_server.bench.server_process import ServerProcess

    concurrency, seed = arguments.concurrency, arguments.seed
    points = closed_points([SHAPE], [concurrency], arguments.rounds, 1, seed)
    if case == "arriving":
        points = open_points([SHAPE], [concurrency / (SHAPE[1] * PAUSE)], arguments.seconds, seed)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(port), "--pause", str(CASES[case])]
    endpoint = Endpoint(case, f"http://127.0.0.1:{port}", MODEL)
    with ServerProcess(command, endpoint.root) as server:
        server.wait_ready(60)
        process = psutil.Process(server.pid)
        before = process.cpu_times()
        (row,) = run_points([endpoint], points, ASCII_IDS, workers=arguments.workers)
        after = process.cpu_times()
    cpu = (after.user + after.system) - (before.user + before.system)
    return row | {"pause_ms": CASES[case] * 1e3, "server_cpu_s": round(cpu, 3)}


def main() -> None:
    """Measure, or be the server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY)
    parser.add_argument("--rounds", type=int, default=8, help="requests of a closed loop for each one in flight")
    parser.add_argument("--seconds", type=float, default=15.0, help="of Poisson arrivals")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--hold", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.pause, arguments.hold)
        return
    from pegainfer_server.bench.provenance import provenance
    from pegainfer_server.bench.report import LOAD_COLUMNS, document, finish, show, warnings

    rows = [measure(case, arguments) for case in CASES]
    show("HTTP layer over an instant engine: times in ms", rows, LOAD_COLUMNS)
    finish(
        document("http layer", provenance("http_layer", vars(arguments)), points=rows), arguments.out, warnings(rows)
    )


if __name__ == "__main__":
    main()
