"""`pegainfer serve`: flags to `EngineConfig` and `ServerOptions`; the work is `pegainfer_server.serve`'s."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pegainfer_core.chat_events import ReasoningField
from pegainfer_core.config import EngineConfig
from pegainfer_core.logs import LogFormat

from pegainfer_server.flags import API_KEY_VARIABLE, parse_size, with_engine_flags

GenerationConfig = Literal["auto", "none"]
if TYPE_CHECKING:
    from pegainfer_server.tls import Tls

LogLevel = Literal["debug", "info", "warning", "error"]
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


@with_engine_flags()
def serve(
    config: EngineConfig,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 or :: for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str],
        typer.Option(help="Name that clients use; repeat for more. Default: MODEL."),
    ] = [],  # noqa: B006 - typer copies it
    api_key: Annotated[
        list[str],
        typer.Option(
            help=f"Key that clients must send; repeat for more. {API_KEY_VARIABLE} holds one, or several with commas between "
            "them, without showing them in ps.",
        ),
    ] = [],  # noqa: B006
    api_key_file: Annotated[Path | None, typer.Option(help="File with one API key a line.")] = None,
    generation_config: Annotated[
        GenerationConfig,
        typer.Option(
            help="auto: sampling values of the checkpoint's generation_config.json hold where a request says nothing; "
            "none: the OpenAI API's do. EOS ids come from it either way."
        ),
    ] = "auto",
    allowed_origins: Annotated[
        list[str],
        typer.Option(
            metavar="ORIGIN",
            help="Web origin whose pages may call this server (CORS), such as https://app.example, or * for all; repeat for more.",
        ),
    ] = [],  # noqa: B006
    max_requests_per_minute: Annotated[
        int,
        typer.Option(
            min=0, help="Most POST requests of each API key, or of each client address without keys; 0: no limit."
        ),
    ] = 0,
    reasoning_field: Annotated[
        ReasoningField, typer.Option(help="Under which name chat completions tell the model's thinking.")
    ] = "reasoning_content",
    shutdown_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that live requests get on SIGTERM or SIGINT.")
    ] = 30.0,
    max_body_size: Annotated[
        int,
        typer.Option(parser=parse_size, metavar="SIZE", help="Largest request body."),
    ] = "32MiB",  # type: ignore[assignment]  # the parser reads it
    plain_messages: Annotated[
        bool,
        typer.Option(
            "--plain-messages/--no-plain-messages",
            help="Control tokens that messages of users and tools spell stay text: they cannot end a turn or begin another.",
        ),
    ] = False,
    ui: Annotated[
        bool, typer.Option("--ui/--no-ui", help="Show browsers a page with a chat and a live view at /.")
    ] = True,
    stall_timeout: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds without a step after which an engine with open requests is no longer alive (/livez); 0: never.",
        ),
    ] = 120.0,
    ssl_certfile: Annotated[Path | None, typer.Option(help="Certificate in PEM format; serves HTTPS.")] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="Its key, without a password, if --ssl-certfile does not hold it.")
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None, typer.Option(help="Authorities one of which must have signed a client's certificate.")
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Take chat_template from requests; each is rendered in a process of its own, with limits.",
        ),
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="OpenTelemetry collector that gets a trace of each request, by OTLP over HTTP; extra tracing.",
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least severe messages to log.")] = "info",
    log_format: Annotated[LogFormat, typer.Option(help="Lines of text, or one JSON object a line.")] = "text",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write request bodies, prompts and all, to the log.")
    ] = False,
) -> None:
    """Serve MODEL over the OpenAI API."""
    from pegainfer_server.serve import ServerOptions, run_server

    if not all(name.strip() for name in served_model_name):
        raise typer.BadParameter("--served-model-name must not be empty")
    if max_body_size < 1:
        raise typer.BadParameter(f"--max-body-size must be at least 1 byte, got {max_body_size}")
    options = ServerOptions(
        host=host,
        port=port,
        served_model_names=tuple(served_model_name) or (config.model,),
        api_keys=collect_api_keys(api_key, api_key_file),
        shutdown_timeout=shutdown_timeout,
        max_body_bytes=max_body_size,
        checkpoint_defaults=generation_config == "auto",
        reasoning_field=reasoning_field,
        plain_messages=plain_messages,
        log_level=log_level,
        ui=ui,
        log_format=log_format,
        log_prompts=log_prompts,
        allowed_origins=check_origins(allowed_origins),
        requests_per_minute=max_requests_per_minute,
        stall_timeout=stall_timeout,
        trust_request_chat_template=trust_request_chat_template,
        otlp_traces_endpoint=otlp_traces_endpoint,
        tls=tls_files(ssl_certfile, ssl_keyfile, ssl_ca_certs),
    )
    raise typer.Exit(run_server(config, options))


def collect_api_keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    """Keys from flags, file and environment. Raises typer.BadParameter for an empty key or an unreadable file."""
    keys = list(given)
    if file is not None:
        try:
            in_file = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--api-key-file {file} cannot be read: {error}") from None
        keys += [key for key in in_file if key]
        if not any(in_file):  # otherwise a server meant to be closed would be open
            raise typer.BadParameter(f"--api-key-file {file} holds no key")
    if API_KEY_VARIABLE in os.environ:
        keys += [key.strip() for key in os.environ[API_KEY_VARIABLE].split(",")]
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or key != key.strip() or "," in key:
            raise typer.BadParameter(
                "an API key must be printable ASCII without commas or spaces around it, and not empty"
            )
    return tuple(dict.fromkeys(keys))


def check_origins(given: list[str]) -> tuple[str, ...]:
    """Origins for CORS. Raises typer.BadParameter for what no browser would send."""
    for origin in given:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise typer.BadParameter(
                f"--allowed-origins {origin}: an origin is a scheme and a host, such as https://app.example, or *"
            )
    return tuple(given)


def tls_files(certfile: Path | None, keyfile: Path | None, ca_certs: Path | None) -> Tls | None:
    """What the TLS flags say together. Raises typer.BadParameter for a flag that needs another."""
    if certfile is None:
        if keyfile is not None or ca_certs is not None:
            raise typer.BadParameter("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        return None
    from pegainfer_server.tls import Tls

    return Tls(certfile, keyfile, ca_certs)
