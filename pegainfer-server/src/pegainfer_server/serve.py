"""What `pegainfer serve` does: bind the port, then load the model behind a running server.

Owns the composition: which socket, client, state and loader a `Lifecycle` gets. The port is bound first, so that a port in
use is known before anything is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from pegainfer_core.chat_events import ReasoningField
from pegainfer_core.client import EngineClient
from pegainfer_core.config import EngineConfig
from pegainfer_core.logs import LogFormat, configure_logging
from pegainfer_core.plugins import Plugins, load_plugins
from pegainfer_core.preload import read_ahead
from pegainfer_core.process_client import ProcessClient
from pegainfer_core.resolve import ResolvedModel, resolve_model
from pegainfer_core.settling import settle

from pegainfer_server.lifecycle import Lifecycle
from pegainfer_server.listening import listen
from pegainfer_server.liveness import DEFAULT_STALL_TIMEOUT
from pegainfer_server.state import ServerState
from pegainfer_server.threads import in_daemon_thread
from pegainfer_server.tls import Tls

if TYPE_CHECKING:
    from fastapi import FastAPI
    from pegainfer_core.chat import ChatFormat
    from pegainfer_core.tokenizer import Tokenizer

log = logging.getLogger(__name__)

QUIET_LOGGERS = ("uvicorn", "httpx", "httpcore", "huggingface_hub", "filelock")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the operator chose for the server; the engine's settings are in `EngineConfig`."""

    host: str
    port: int
    """0 takes a free one."""
    served_model_names: tuple[str, ...]
    """At least one; the first is the primary name."""
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    shutdown_timeout: float = 30.0
    """Seconds that live requests get on the first signal."""
    max_body_bytes: int
    checkpoint_defaults: bool = True
    """Whether sampling values of generation_config.json are defaults of requests; its EOS ids count either way."""
    reasoning_field: ReasoningField = "reasoning_content"
    """Under which name chat completions tell thinking."""
    plain_messages: bool = False
    """Whether control tokens that users and tools spell stay text."""
    log_level: str = "info"
    ui: bool = True
    """Whether there is a web page at /."""
    log_format: LogFormat = "text"
    log_prompts: bool = False
    allowed_origins: tuple[str, ...] = ()
    requests_per_minute: int = 0
    """0: no limit."""
    stall_timeout: float = DEFAULT_STALL_TIMEOUT
    tls: Tls | None = None
    trust_request_chat_template: bool = False
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector; None: no traces."""


def run_server(config: EngineConfig, options: ServerOptions) -> int:
    """Serve until a signal; returns the exit code. Raises PegainferError if the start fails or the engine dies."""
    begun = time.monotonic()
    configure_server_logging(options.log_level, options.log_format)
    if options.tls is not None:
        options.tls.check()
    with contextlib.closing(listen(options.host, options.port)) as listener:
        plugins = load_plugins()
        for broken in plugins.broken:
            log.warning("plugin %s", broken)
        client = ProcessClient(config, options.log_format)
        state = ServerState(
            client=client,
            model_names=options.served_model_names,
            api_keys=options.api_keys,
            max_body_bytes=options.max_body_bytes,
            prefix_cache=config.prefix_cache,
            reasoning_field=options.reasoning_field,
            ui=options.ui,
            allowed_origins=options.allowed_origins,
            requests_per_minute=options.requests_per_minute,
            log_prompts=options.log_prompts,
            stall_timeout=options.stall_timeout,
            trust_request_chat_template=options.trust_request_chat_template,
        )
        lifecycle = Lifecycle(
            state,
            listener,
            lambda state: load_model(config, plugins, client, state, options),
            add_routes=lambda app, client: add_plugin_routes(plugins, app, client),
            shutdown_timeout=options.shutdown_timeout,
            begun=begun,
            tls=options.tls,
            log_format=options.log_format,
        )
        with _tracing(options, state), asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(lifecycle.run())


@contextlib.contextmanager
def _tracing(options: ServerOptions, state: ServerState) -> Iterator[None]:
    """Traces of all requests, where they are asked for; what is left of them is sent at the end."""
    if options.otlp_traces_endpoint is None:
        yield
        return
    from pegainfer_server.tracing import open_tracing

    tracing = open_tracing(options.otlp_traces_endpoint, state.model_names[0])
    state.on_request.append(tracing.on_request)
    try:
        yield
    finally:
        tracing.close()


async def load_model(
    config: EngineConfig, plugins: Plugins, client: ProcessClient, state: ServerState, options: ServerOptions
) -> None:
    """Resolve the checkpoint, then start the engine and load the text tools beside it."""
    await client.spawn()
    resolved = await in_daemon_thread(lambda: resolve_model(config, plugins))
    for warning in resolved.warnings:
        log.warning("%s", warning)
    read_ahead(resolved.checkpoint.path)
    client.config = resolved.config  # the engine finds the very files that were found here
    await client.start()
    from pegainfer_server.sampling import defaults_from_generation_config  # takes a while, beside the engine

    if options.checkpoint_defaults:
        state.default_sampling = defaults_from_generation_config(resolved.checkpoint.generation_config)
    log.info("engine config %s", msgspec.json.encode(resolved.config).decode())
    text = asyncio.create_task(
        in_daemon_thread(lambda: load_text_tools(resolved, plain_messages=options.plain_messages))
    )
    ready = asyncio.create_task(client.wait_ready())
    await _first_failure(text, ready)
    tokenizer, state.chat_format = text.result()
    state.tokenizer = tokenizer


def load_text_tools(resolved: ResolvedModel, *, plain_messages: bool) -> tuple[Tokenizer, ChatFormat]:
    """The checkpoint's tokenizer and chat format. Raises CheckpointError or PluginError."""
    tokenizer = resolved.load_tokenizer()
    chat_format = resolved.load_chat_format(tokenizer)
    if plain_messages:
        from pegainfer_core.plain_messages import PlainMessages

        chat_format = PlainMessages(chat_format, tokenizer)
    settle()  # now, while the engine has more to load: a vocabulary leaves 50 MB behind
    return tokenizer, chat_format


def add_plugin_routes(plugins: Plugins, app: FastAPI, client: EngineClient) -> None:
    """Let plugins add theirs; one that fails is logged and the server goes on without its routes."""
    for implementation in plugins.implementations("pegainfer_add_routes"):
        try:
            implementation(app=app, client=client)
        except Exception:  # a plugin's mistake must not stop the server
            log.exception("plugin %s could not add its routes", implementation.plugin)


def configure_server_logging(level: str, log_format: LogFormat) -> None:
    """One line a record on stderr. Libraries are quiet unless the level is debug."""
    configure_logging(level.upper(), log_format)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel("DEBUG" if level == "debug" else "WARNING")


async def _first_failure(*tasks: asyncio.Task[Any]) -> None:
    """Wait for all, or raise the first error and cancel the others."""
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # it has no wheel for this platform
        return None
    return uvloop.new_event_loop
