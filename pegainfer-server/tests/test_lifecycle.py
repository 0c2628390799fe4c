"""The server's life on a real port, with a scripted engine: readiness, draining, death, errors at start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import trustme
from pegainfer_core.errors import ConfigError, EngineDeadError
from pegainfer_core.messages import AddRequest, LoadProgress
from pegainfer_core.testing.fake_client import FakeEngineClient, fake_info
from pegainfer_core.testing.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer
from pegainfer_core.tokenizer import load_tokenizer
from pegainfer_server.lifecycle import Lifecycle
from pegainfer_server.listening import is_public, listen, url_of
from pegainfer_server.state import ServerState
from pegainfer_server.tls import Tls


def endless(request: AddRequest) -> list[int]:
    return [40] * 10_000


class Running:
    """A lifecycle under test: the task, its client, and an HTTP connection to it."""

    def __init__(self, folder: Path) -> None:
        write_tiny_tokenizer(folder)
        self.client = FakeEngineClient(fake_info(VOCAB_SIZE), endless, auto=False)
        self.state = ServerState(client=self.client, model_names=("fake",))
        self.folder = folder
        self.may_load = asyncio.Event()
        self.listener = listen("127.0.0.1", 0)
        self.http = httpx.AsyncClient(base_url=url_of(self.listener), timeout=30)
        self.task: asyncio.Task[int] | None = None

    async def load(self, state: ServerState) -> None:
        await self.may_load.wait()
        await self.client.start()
        state.tokenizer = load_tokenizer(self.folder)

    def start(
        self, shutdown_timeout: float = 30.0, load: Callable[[ServerState], Awaitable[None]] | None = None
    ) -> asyncio.Task[int]:
        lifecycle = Lifecycle(
            self.state, self.listener, load or self.load, shutdown_timeout=shutdown_timeout, begun=time.monotonic()
        )
        self.task = asyncio.create_task(lifecycle.run())
        return self.task

    async def start_ready(self, shutdown_timeout: float = 30.0) -> asyncio.Task[int]:
        self.may_load.set()
        task = self.start(shutdown_timeout)
        await self.client.wait_ready()
        await self.until_health(200)
        return task

    async def until_health(self, status: int) -> None:
        """Ask until /health answers `status`; each question lets the server run."""
        while (await self.http.get("/health")).status_code != status:
            pass

    async def open_stream(self) -> tuple[httpx.Response, AsyncIterator[str]]:
        """A streaming request of which the first token has arrived."""
        body = {"model": "fake", "prompt": "Hello", "max_tokens": 50, "stream": True}
        request = self.http.build_request("POST", "/v1/completions", json=body)
        sending = asyncio.create_task(self.http.send(request, stream=True))
        while not self.client.open_ids:
            await self.http.get("/health")
        self.client.step()
        response = await sending
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        return response, lines


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    running = Running(tmp_path)
    yield running
    await running.http.aclose()
    if running.task is not None and not running.task.done():
        running.task.cancel()
        await asyncio.wait({running.task})
    running.listener.close()


async def rest(lines: AsyncIterator[str]) -> str:
    return "\n".join([line async for line in lines])


async def test_health_is_503_while_loading_and_200_when_ready(running: Running) -> None:
    running.client.dispatch(LoadProgress("weights", 3, 7))
    task = running.start()
    loading = await running.http.get("/health")
    assert loading.status_code == 503
    assert loading.json()["status"] == "loading"
    refused = await running.http.post("/v1/completions", json={"model": "fake", "prompt": "Hello"})
    assert refused.status_code == 503
    running.may_load.set()
    await running.until_health(200)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0
    assert running.client.closed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_live_streams_finish(running: Running, number: signal.Signals) -> None:
    task = await running.start_ready()
    _, lines = await running.open_stream()
    os.kill(os.getpid(), number)
    await running.until_health(503)
    late = await running.http.post("/v1/completions", json={"model": "fake", "prompt": "Hello"})
    assert late.status_code == 503
    assert late.json()["error"]["code"] == "shutting_down"
    assert not task.done()
    while running.client.open_ids:
        running.client.step()
    text = await rest(lines)
    assert '"finish_reason":"length"' in text
    assert text.rstrip().endswith("data: [DONE]")
    assert await task == 0


async def test_streams_that_outlast_the_timeout_are_ended_in_order(running: Running) -> None:
    task = await running.start_ready(shutdown_timeout=0.0)
    _, lines = await running.open_stream()
    os.kill(os.getpid(), signal.SIGTERM)
    text = await rest(lines)
    assert "abort" in text
    assert text.rstrip().endswith("data: [DONE]")
    assert await task == 0


async def test_a_signal_without_live_requests_ends_at_once(running: Running) -> None:
    task = await running.start_ready()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0
    with pytest.raises(httpx.ConnectError):
        await running.http.get("/health")


async def test_the_death_of_the_engine_fails_open_requests_and_ends_the_server(running: Running) -> None:
    task = await running.start_ready()
    _, lines = await running.open_stream()
    running.client.died("exit code -9 (killed)")
    text = await rest(lines)
    assert '"error"' in text
    assert "exit code -9 (killed)" in text
    health = await running.http.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "dead")
    refused = await running.http.post("/v1/completions", json={"model": "fake", "prompt": "Hello"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
    with pytest.raises(EngineDeadError, match=r"the engine died: exit code -9 \(killed\)"):
        await task


async def test_an_error_while_loading_ends_the_server_with_it(running: Running) -> None:
    async def load(state: ServerState) -> None:
        raise ConfigError("model.norm.weight has shape (3,)")

    with pytest.raises(ConfigError, match=r"model.norm.weight has shape \(3,\)"):
        await running.start(load=load)
    assert running.client.closed


async def test_routes_of_plugins_are_added(running: Running) -> None:
    lifecycle = Lifecycle(
        running.state,
        running.listener,
        running.load,
        add_routes=lambda app, client: app.add_api_route("/extra", lambda: client.state),
        shutdown_timeout=1.0,
        begun=time.monotonic(),
    )
    task = asyncio.create_task(lifecycle.run())
    assert (await running.http.get("/extra")).json() == "loading"
    running.may_load.set()
    await running.client.wait_ready()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write_tls(authority: trustme.CA, folder: Path) -> Tls:
    """Certificate, key and authority as files."""
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    return Tls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")


async def test_https_with_client_certificates(running: Running, authority: trustme.CA, tmp_path: Path) -> None:
    tls = write_tls(authority, tmp_path)
    tls.check()
    lifecycle = Lifecycle(
        running.state, running.listener, running.load, shutdown_timeout=1.0, begun=time.monotonic(), tls=tls
    )
    running.may_load.set()
    task = asyncio.create_task(lifecycle.run())
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    url = url_of(running.listener, "https")
    async with httpx.AsyncClient(base_url=url, verify=context, timeout=30) as stranger:
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
            await stranger.get("/livez")
    authority.issue_cert("client.example").configure_cert(context)
    async with httpx.AsyncClient(base_url=url, verify=context, timeout=30) as friend:
        assert (await friend.get("/livez")).json() == {"status": "alive"}
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


def test_bad_tls_files_are_told_with_their_flags(authority: trustme.CA, tmp_path: Path) -> None:
    good = write_tls(authority, tmp_path)
    other = tmp_path / "other.pem"
    authority.issue_cert("x.example").private_key_pem.write_to_path(str(other))
    (tmp_path / "empty.pem").write_text("")
    for tls, flag in (
        (Tls(tmp_path / "none.pem"), "--ssl-certfile"),
        (Tls(good.certfile), "--ssl-certfile"),
        (Tls(good.certfile, other), "--ssl-keyfile"),
        (Tls(good.certfile, good.keyfile, tmp_path / "empty.pem"), "--ssl-ca-certs"),
    ):
        with pytest.raises(ConfigError, match=flag):
            tls.check()


SCRIPT = """
import asyncio, sys, time
from pathlib import Path
from pegainfer_core.testing.fake_client import FakeEngineClient, fake_info
from pegainfer_server.listening import listen, url_of
from pegainfer_server.lifecycle import Lifecycle
from pegainfer_server.state import ServerState

async def load(state):
    print(url_of(listener), flush=True)
    await asyncio.Event().wait()

listener = listen("127.0.0.1", 0)
client = FakeEngineClient(fake_info(512))
client.close = asyncio.Event().wait  # an engine that does not end
lifecycle = Lifecycle(ServerState(client=client, model_names=("fake",)), listener, load, shutdown_timeout=60, begun=0.0)
sys.exit(asyncio.run(lifecycle.run()))
"""


def test_a_second_signal_ends_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            health = server.stdout.readline().strip() + "/health"
            assert httpx.get(health, timeout=30).json()["status"] == "loading"
            server.send_signal(signal.SIGTERM)
            while httpx.get(health, timeout=30).json()["status"] == "loading":
                pass
            assert server.poll() is None
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 128 + signal.SIGTERM
        finally:
            server.kill()


def test_a_port_in_use_is_told_in_one_line() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            listen("127.0.0.1", port)


def test_an_unknown_host_is_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid: no such address"):
        listen("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("host", "url", "public"),
    [
        ("127.0.0.1", "http://127.0.0.1:", False),
        ("0.0.0.0", "http://127.0.0.1:", True),
        ("::1", "http://[::1]:", False),
    ],
)
def test_urls_and_reach(host: str, url: str, public: bool) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with listen(host, 0) as listener:
        assert url_of(listener) == f"{url}{listener.getsockname()[1]}"
        assert is_public(listener) == public
