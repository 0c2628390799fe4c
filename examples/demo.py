"""What `make demo` runs: a real model on CPU, served as it would be anywhere, and asked one question.

Makes the checkpoint, starts `pegainfer serve` on a free port, waits for /health, streams one answer through the OpenAI
API, says how to go on, and stops the server (or keeps it with --keep).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from pegainfer_llama.smollm2 import SourceError, ensure_checkpoint
from rich.console import Console

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
START_SECONDS = 300  # a cold disk and a busy machine; the usual start is seconds
STOP_SECONDS = 30


class DemoError(Exception):
    """Something the demo needs did not happen."""


def main() -> int:
    """Run the demo. Exit code 1 if the server did not start or did not answer."""
    parser = argparse.ArgumentParser(description="Serve SmolLM2-135M-Instruct on CPU and ask it one question.")
    parser.add_argument("--prompt", default=QUESTION, help="what to ask (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="go on serving until Ctrl-C")
    parser.add_argument("--port", type=int, help="port to serve on (default: a free one)")
    arguments = parser.parse_args()
    console = Console()
    try:
        checkpoint = ensure_checkpoint()
        with server(checkpoint, arguments.port or free_port(), console) as (url, process):
            ask(url, arguments.prompt, console)
            explain(url, checkpoint, console, keep=arguments.keep)
            if arguments.keep:
                process.wait()
    except KeyboardInterrupt:
        return 130
    except (DemoError, SourceError, httpx.HTTPError) as error:
        console.print(f"[bold red]make demo failed:[/] {error}")
        return 1
    return 0


@contextlib.contextmanager
def server(checkpoint: Path, port: int, console: Console) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A running, ready server: its base URL and its process. Stopped on leaving."""
    command = [str(Path(sys.executable).with_name("pegainfer")), "serve", str(checkpoint)]
    command += ["--port", str(port), "--served-model-name", MODEL, "--log-level", "warning"]
    console.print(f"\n[dim]$ {' '.join(['pegainfer', *command[1:]])}[/]", highlight=False, soft_wrap=True)
    started = time.monotonic()
    process = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(process, url)
        console.print(f"[dim]ready after {time.monotonic() - started:.1f} s[/]")
        yield url, process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    """Return once /health says 200. Raises DemoError if the server ends before that, or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DemoError(f"the server ended with exit code {process.returncode}; its message is above")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise DemoError(f"the server was not ready after {START_SECONDS} s")


def ask(url: str, question: str, console: Console) -> None:
    """Print the question and, as it comes, the answer."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 200,
        "stream": True,
    }
    console.print(f"\n[bold]you:[/] {question}\n[bold]{MODEL}:[/] ", end="", highlight=False)
    text = ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as response:
        if response.status_code != httpx.codes.OK:
            raise DemoError(f"the server answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise DemoError(f"the stream ended with an error: {event['error']}")
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                text += piece
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    if not text.strip():
        raise DemoError("the answer is empty")


def explain(url: str, checkpoint: Path, console: Console, *, keep: bool) -> None:
    """How to talk to the model further."""
    message = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Tell me a joke."}]})
    if keep:
        lines = [
            "Serving until Ctrl-C. From another terminal:",
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{message}'",
            f"  .venv/bin/pegainfer chat --url {url}",
        ]
    else:
        lines = [
            "Go on with one of:",
            "  make demo KEEP=1",
            f"  .venv/bin/pegainfer serve {checkpoint}",
            f"  .venv/bin/pegainfer chat {checkpoint}",
        ]
    for line in ["", *lines]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
