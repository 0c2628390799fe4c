"""`pegainfer serve` as a user runs it: a process with an engine process, a tiny real checkpoint, signals and deaths."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pegainfer_core import LLM
from pegainfer_core.testing.corrupt import drop_tensor, edit_config
from pegainfer_qwen3.testing import write_tiny_qwen3
from pegainfer_server.cli import main

PEGAINFER = [sys.executable, "-m", "pegainfer_server.cli"]
PATIENCE = 120  # seconds until a test gives up on a process; nothing is measured by it
SMALL = ["--kv-cache-memory", "16MiB"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("served") / "tiny")


class Server:
    """A running `pegainfer serve` that said it is ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line)
            if (said := re.search(r"serving .* at (http\S+)/v1", line)) is not None:
                self.url = said[1]
                return
        raise AssertionError(f"the server ended with exit code {process.wait()}: {''.join(self.lines)}")

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE)

    @contextmanager
    def stream(self, max_tokens: int) -> Iterator[Iterator[str]]:
        """The lines of a streamed completion, of which the first token has come."""
        body = {"prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            yield lines

    def end(self) -> tuple[int, str]:
        """(exit code, rest of stderr) once it ended."""
        _, rest = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, rest


@contextmanager
def serve(*arguments: str) -> Iterator[Server]:
    command = [*PEGAINFER, "serve", *arguments, "--port", "0", *SMALL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def wait_gone(pidfd: int) -> bool:
    """Whether the process ended; a pidfd becomes readable then."""
    return bool(select.select([pidfd], [], [], PATIENCE)[0])


needs_proc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes through /proc")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """One server for the tests that leave it as it was."""
    with serve(str(checkpoint), "--served-model-name", "tiny", "--served-model-name", "alias") as server:
        yield server


def test_it_answers_under_all_its_names(server: Server) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    names = [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]
    assert names == ["tiny", "alias"]
    for name in names:
        answer = server.post({"model": name, "prompt": "Hello", "max_tokens": 3, "temperature": 0}).json()
        assert answer["usage"]["completion_tokens"] <= 3
        assert answer["model"] == name


def test_the_start_says_what_is_served_and_how_long_it_took(server: Server) -> None:
    text = "".join(server.lines)
    assert "qwen3 in float32 on cpu" in text
    assert re.search(r"^import [\d.]+ s, .*ready [\d.]+ s$", text, re.MULTILINE)
    assert "engine config {" in text
    assert server.lines[-1].startswith("serving tiny, alias at http://127.0.0.1:")


@needs_proc
def test_the_api_process_has_no_torch(server: Server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{children(server.process.pid)[0]}/maps").read_text()


def chat(server: Server, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [*PEGAINFER, "chat", "--url", server.url, *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_chat_with_the_server(server: Server) -> None:
    asked = chat(server, "--prompt", "Hi", "--max-tokens", "5", "--temperature", "0")
    assert asked.returncode == 0, asked.stderr
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    assert asked.stdout == answer["choices"][0]["message"]["content"] + "\n"
    piped = chat(server, "--max-tokens", "5", "--temperature", "0", text="Hi")
    assert piped.stdout == asked.stdout


def test_chat_tells_the_servers_error(server: Server) -> None:
    asked = chat(server, "--prompt", "Hi", "--model-name", "other")
    assert asked.returncode == 1
    assert asked.stderr.startswith(f"error: {server.url}/v1: 404 ")


def test_chat_and_generate_with_the_model_give_the_servers_text(
    server: Server, checkpoint: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    greedy = ["--max-tokens", "6", "--temperature", "0", *SMALL]
    asked = chat(server, "--prompt", "Hi", "--max-tokens", "6", "--temperature", "0")
    assert main(["chat", str(checkpoint), "--prompt", "Hi", *greedy]) == 0
    assert capfd.readouterr().out == asked.stdout

    expected = server.post({"prompt": "Hello", "max_tokens": 6, "temperature": 0}).json()["choices"][0]
    assert main(["generate", str(checkpoint), "--prompt", "Hello", *greedy]) == 0
    assert capfd.readouterr().out == expected["text"] + "\n"

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"Hello"\n\n{"prompt": [5, 6], "max_tokens": 2, "logprobs": 0, "id": "row-2"}\n')
    output = tmp_path / "out.jsonl"
    assert main(["generate", str(checkpoint), "--input", str(prompts), "--output", str(output), *greedy]) == 0
    first, second = (json.loads(line) for line in output.read_text().splitlines())
    assert first["text"] == expected["text"]
    assert first["finish_reason"] == expected["finish_reason"]
    assert second["prompt"] == [5, 6]
    assert "id" not in first and second["id"] == "row-2"
    assert len(second["token_ids"]) == len(second["logprobs"]) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "nose": 1}', "line 2: there is no sampling field 'nose'"),
        ('{"prompt": [1, "x"]}', "line 2: prompt must be a text or a list of token ids"),
        ('{"prompt": "x", "temperature": -1}', "line 2: temperature must be in [0, 1e+06]"),
        ("{", "line 2: "),
        (r'"\ud800"', "line 2: "),
    ],
)
def test_generate_names_the_bad_line(
    line: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'"fine"\n{line}\n')
    assert main(["generate", "unread", "--input", str(prompts)]) == 1
    assert message in capfd.readouterr().err


def test_inspect_of_a_default_start(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--device", "cpu", "--json"]) == 0
    (target,) = json.loads(capfd.readouterr().out)["footprints"]
    with LLM(str(checkpoint), device="cpu") as llm:
        assert target["pages"] == llm.info.num_pages
        assert target["longest_request"] == llm.info.max_model_len


def test_inspect_agrees_with_the_engine(server: Server, checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--json", "--device", "cpu", *SMALL]) == 0
    report = json.loads(capfd.readouterr().out)
    (target,) = report["footprints"]
    (line,) = [line for line in server.lines if "engine info " in line]
    info = json.loads(line.partition("engine info ")[2])
    assert report["family"] == info["family"]
    assert target["dtype"] == info["dtype"]
    assert target["weight_bytes"] == info["weight_bytes"]
    assert target["pages"] == info["num_pages"]
    assert target["longest_request"] == info["max_model_len"]
    assert main(["inspect", str(checkpoint)]) == 0
    assert "longest request" in capfd.readouterr().out


def test_f4_f5_keys_guard_the_routes_and_logs_of_both_processes_hold_neither_keys_nor_prompts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with --log-format json every line of both is an object."""
    monkeypatch.setenv("PEGAINFER_API_KEY", "key-of-the-environment")
    flags = ["--api-key", "key-of-the-flag", "--log-level", "debug", "--log-format", "json"]
    with serve(str(checkpoint), *flags) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        for key in ("key-of-the-environment", "key-of-the-flag"):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        monkeypatch.setenv("PEGAINFER_API_KEY", "key-of-the-flag,another")
        assert chat(server, "--prompt", "my diary", "--max-tokens", "2").returncode == 0
        assert chat(server, "--prompt", "my diary", "--api-key", "wrong").returncode == 1
        bad = {"prompt": "my diary", "logit_bias": {"my diary": 1}}
        assert httpx.post(f"{server.url}/v1/completions", json=bad, headers=headers).status_code == 400
        server.process.terminate()
        code, rest = server.end()
        assert code == 0
        log = "".join(server.lines) + rest
        records = [json.loads(line) for line in log.splitlines()]
        assert {"pegainfer_server.generation", "pegainfer_core.startup"} & {record["logger"] for record in records}
        assert "key-of" not in log and "diary" not in log


# how it ends


def test_sigterm_lets_a_live_stream_finish(checkpoint: Path) -> None:
    with serve(str(checkpoint)) as server, server.stream(max_tokens=300) as lines:
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in "".join(rest)
        assert rest[-1] == "data: [DONE]"
        code, log = server.end()
        assert code == 0, log
        assert "Traceback" not in log


@needs_proc
def test_a_signal_while_loading_ends_the_start_and_the_engine_process(checkpoint: Path) -> None:
    command = [*PEGAINFER, "serve", str(checkpoint), "--port", "0", *SMALL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while "engine config" not in process.stderr.readline():
                assert process.poll() is None
            engines = children(process.pid)
            while not engines:
                engines = children(process.pid)
            pidfd = os.pidfd_open(engines[0])
            process.terminate()
            _, log = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0, log
            assert "Traceback" not in log
            assert "serving " not in log
            assert wait_gone(pidfd)
            os.close(pidfd)
        finally:
            process.kill()


@needs_proc
def test_the_death_of_the_engine_process(checkpoint: Path) -> None:
    with serve(str(checkpoint)) as server, server.stream(max_tokens=4000) as lines:
        (engine,) = children(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        assert '"error"' in "".join(lines)
        assert httpx.get(f"{server.url}/health").status_code == 503
        code, log = server.end()
        assert code == 1
        assert log.splitlines()[-1] == "error: the engine died: the engine process was killed by SIGKILL"
        assert "Traceback" not in log


@needs_proc
def test_no_orphan_survives_the_servers_sigkill(checkpoint: Path) -> None:
    with serve(str(checkpoint)) as server, server.stream(max_tokens=4000):
        (engine,) = children(server.process.pid)
        pidfd = os.pidfd_open(engine)
        try:
            server.process.kill()
            assert wait_gone(pidfd)
        finally:
            os.close(pidfd)


def failed_start(*arguments: str) -> str:
    """Stderr of a start that must fail with exit code 1 and no traceback."""
    command = [*PEGAINFER, "serve", *arguments, "--log-level", "error"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_tensor_that_is_missing_is_named(checkpoint: Path, tmp_path: Path) -> None:
    damaged = write_tiny_qwen3(tmp_path / "damaged")
    drop_tensor(damaged, "model.layers.1.mlp.up_proj.weight")
    text = failed_start(str(damaged), "--port", "0")
    assert text.startswith("error: ")
    assert "model.layers.1.mlp.up_proj.weight" in text
    assert len(text.splitlines()) == 1


def test_an_unknown_architecture_names_the_families(checkpoint: Path, tmp_path: Path) -> None:
    strange = write_tiny_qwen3(tmp_path / "strange")
    edit_config(strange, model_type="strange", architectures=["StrangeForCausalLM"])
    text = failed_start(str(strange), "--port", "0")
    assert text.startswith("error: no installed family serves this model (model_type='strange'")
    assert "qwen3: " in text


def test_a_port_in_use_is_the_first_thing_said(server: Server) -> None:
    port = server.url.rpartition(":")[2]
    text = failed_start("no-such-checkpoint", "--port", port)
    assert text == f"error: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


def test_flags_that_the_model_cannot_honour_are_errors(checkpoint: Path) -> None:
    text = failed_start(str(checkpoint), "--port", "0", "-o", "no_option=1")
    assert text.startswith("error: -o no_option=1: qwen3 has no option 'no_option'")
    text = failed_start(str(checkpoint), "--port", "0", "--max-model-len", "100000")
    assert text.startswith("error: --max-model-len 100000")
