"""`pegainfer bench`: loads against running servers. Commands that start an engine or a server are in bench_engine.py.

Owns the flags and their meaning; the work is `pegainfer_server.bench`'s, imported when a command runs, because it needs the extra
`bench`.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pegainfer_core.errors import PegainferError

from pegainfer_server.commands import bench_engine
from pegainfer_server.commands.bench_common import (
    Out,
    Seed,
    TokenIds,
    flags_of,
    on_point,
    parse_shapes,
    require_extra,
)

if TYPE_CHECKING:
    from pegainfer_server.bench.client import Endpoint

app = typer.Typer(
    help="Measure speed and memory: of this engine, of any OpenAI endpoint, of several side by side.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command("throughput")(bench_engine.throughput)
app.command("startup")(bench_engine.startup)
app.command("step")(bench_engine.step)

Url = Annotated[str | None, typer.Option(help="Root of a server, for example http://127.0.0.1:8000.")]
Model = Annotated[str | None, typer.Option(help="Model name to ask for. Default: the first one served.")]
Endpoints = Annotated[
    list[str],
    typer.Option("--endpoint", metavar="NAME=URL", help="A named server; repeat to measure several side by side."),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Key to send; never written to a file.")
]
Workers = Annotated[int, typer.Option(min=1, help="Client processes.")]
KeepItl = Annotated[bool, typer.Option("--keep-itl", help="Write every inter-token time of every request.")]
Warm = Annotated[bool, typer.Option("--warm-up/--no-warm-up", help="Run a small version of each point first.")]


@app.command("serve")
def serve(
    context: typer.Context,
    url: Url = None,
    model: Model = None,
    endpoint: Endpoints = [],  # noqa: B006 - typer copies it
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,...", help="Closed loop: requests in flight; empty for none.")
    ] = "1,8,32",
    rate: Annotated[
        str, typer.Option(metavar="R,R,...", help="Open loop: Poisson arrivals a second; empty for none.")
    ] = "",
    lengths: Annotated[str, typer.Option(metavar="IN/OUT,...", help="Prompt and output tokens.")] = "1024/128",
    rounds: Annotated[int, typer.Option(min=1, help="Closed loop: requests for each one in flight.")] = 4,
    least: Annotated[int, typer.Option(min=1, help="Closed loop: requests at least.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, help="Open loop: seconds of arrivals.")] = 30.0,
    token_ids: TokenIds = "1000:32000",  # type: ignore[assignment]  # the parser reads it
    seed: Seed = None,
    workers: Workers = 1,
    warm: Warm = True,
    keep_itl: KeepItl = False,
    api_key: ApiKey = None,
    out: Out = None,
) -> None:
    """Load servers: closed loop at fixed concurrency, open loop with Poisson arrivals.

    Streams /v1/completions with random prompts of token ids, greedy, ignoring EOS. Every server gets the same prompts and
    arrivals, one server after the other at each point.
    """
    require_extra()
    from pegainfer_server.bench.serve_bench import closed_points, open_points

    shapes = parse_shapes(lengths)
    seed = secrets.randbits(31) if seed is None else seed
    points = closed_points(shapes, _integers(concurrency, "--concurrency"), rounds, least, seed)
    points += open_points(shapes, _numbers(rate, "--rate"), seconds, seed, len(points))
    if not points:
        raise typer.BadParameter("give --concurrency or --rate")
    _measure(
        "serve",
        context,
        _endpoints(url, model, endpoint, api_key),
        points,
        token_ids,
        seed,
        workers,
        warm,
        keep_itl,
        out,
    )


@app.command("latency")
def latency(
    context: typer.Context,
    url: Url = None,
    model: Model = None,
    endpoint: Endpoints = [],  # noqa: B006
    lengths: Annotated[
        str, typer.Option(metavar="IN/OUT,...", help="Prompt and output tokens.")
    ] = "128/256,1024/128,4096/128",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each shape.")] = 8,
    token_ids: TokenIds = "1000:32000",  # type: ignore[assignment]  # the parser reads it
    seed: Seed = None,
    warm: Warm = True,
    keep_itl: KeepItl = False,
    api_key: ApiKey = None,
    out: Out = None,
) -> None:
    """Measure one stream: first token and pace, by lengths."""
    require_extra()
    from pegainfer_server.bench.serve_bench import closed_points

    seed = secrets.randbits(31) if seed is None else seed
    points = closed_points(parse_shapes(lengths), [1], requests, requests, seed)
    _measure(
        "latency", context, _endpoints(url, model, endpoint, api_key), points, token_ids, seed, 1, warm, keep_itl, out
    )


@app.command("prefix")
def prefix(
    context: typer.Context,
    url: Url = None,
    model: Model = None,
    endpoint: Endpoints = [],  # noqa: B006
    lengths: Annotated[str, typer.Option(metavar="N,N,...", help="Prompt tokens.")] = "1024,4096,16384",
    num_prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of each length.")] = 3,
    repeats: Annotated[int, typer.Option(min=1, help="Warm requests of each prompt, after a cold one.")] = 10,
    token_ids: TokenIds = "1000:32000",  # type: ignore[assignment]  # the parser reads it
    seed: Seed = None,
    api_key: ApiKey = None,
    out: Out = None,
) -> None:
    """Measure the first token of a prompt that was seen before, by length."""
    require_extra()
    from pegainfer_server.bench import engine_facts
    from pegainfer_server.bench.prefix_bench import PREFIX_COLUMNS, run_prefix
    from pegainfer_server.bench.provenance import provenance
    from pegainfer_server.bench.report import document, finish, show

    seed = secrets.randbits(31) if seed is None else seed
    endpoints = _endpoints(url, model, endpoint, api_key)
    facts = {item.name: engine_facts.ask(item) for item in endpoints}
    sizes = _integers(lengths, "--lengths")
    rows = run_prefix(endpoints, sizes, token_ids, num_prompts=num_prompts, warm=repeats, seed=seed)
    show("first token, cold and warm", rows, PREFIX_COLUMNS)
    flags = flags_of(context, seed=seed)
    finish(document("prefix", provenance("bench prefix", flags), engines=facts, lengths=rows), out)


@app.command("soak")
def soak(
    context: typer.Context,
    url: Annotated[str, typer.Option(help="Root of the server; nobody else may use it meanwhile.")],
    model: Model = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long new requests are sent.")] = 60.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    mix: Annotated[str, typer.Option(metavar="V,I,D", help="Shares of valid, invalid and dropped requests.")] = "6,3,3",
    max_input: Annotated[int, typer.Option(min=8, help="Longest prompt, in tokens.")] = 256,
    max_output: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    margin: Annotated[
        float,
        typer.Option(
            min=0.0, help="Canary: a change where the best two tokens were this close, in nat, is no failure."
        ),
    ] = 0.2,
    token_ids: TokenIds = "1000:32000",  # type: ignore[assignment]  # the parser reads it
    seed: Seed = None,
    api_key: ApiKey = None,
    out: Out = None,
) -> None:
    """Soak a server: valid, invalid and dropped requests at once, and a canary whose greedy answer must not change.

    Afterwards the gauges of running and waiting requests and of KV use must be back where they were. Exit code 1 if anything was wrong.
    """
    require_extra()
    from pegainfer_server.bench import engine_facts
    from pegainfer_server.bench.provenance import provenance
    from pegainfer_server.bench.report import document, finish, show
    from pegainfer_server.bench.soak import SOAK_COLUMNS, Soak
    from pegainfer_server.bench.soak_requests import RequestMix

    weights = _shares(mix)
    seed = secrets.randbits(31) if seed is None else seed
    (endpoint,) = _endpoints(url, model, [], api_key)
    facts = engine_facts.ask(endpoint)
    requests = RequestMix(
        endpoint.model,
        token_ids,
        weights=weights,
        max_input=max_input,
        max_output=max_output,
        max_model_len=facts["model"].get("max_model_len"),
        seed=seed,
    )
    canary = [token_ids[7 * k % len(token_ids)] for k in range(16)]
    figures = Soak(endpoint, requests, canary, margin, seed).run(seconds, concurrency)
    show("soak", figures["rows"], SOAK_COLUMNS)
    failures = figures["failures"]
    content = document(
        "soak", provenance("bench soak", flags_of(context, seed=seed)), engines={"server": facts}, **figures
    )
    finish(content, out, failures)
    if failures:
        raise typer.Exit(1)


@app.command("plot")
def plot(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Results of bench serve or bench latency.")],
    out: Annotated[Path, typer.Option(metavar="NAME", help="Where to write, without an ending.")] = Path("bench"),
    title: Annotated[str | None, typer.Option(help="Default: machine, driver, date and commit.")] = None,
) -> None:
    """Draw throughput-latency curves as PNG and SVG."""
    require_extra("matplotlib")
    from pegainfer_server.bench.plot import draw, read_points

    points, caption = read_points(files)
    for file in draw(points, caption if title is None else f"{title}\n{caption}", out):
        typer.echo(f"wrote {file}")


def _measure(
    kind: str,
    context: typer.Context,
    endpoints: list[Endpoint],
    points: list[Any],
    token_ids: range,
    seed: int,
    workers: int,
    warm: bool,
    keep_itl: bool,
    out: Path | None,
) -> None:
    from pegainfer_server.bench import engine_facts
    from pegainfer_server.bench.provenance import provenance
    from pegainfer_server.bench.report import LOAD_COLUMNS, document, finish, show, warnings
    from pegainfer_server.bench.serve_bench import run_points

    facts = {endpoint.name: engine_facts.ask(endpoint) for endpoint in endpoints}
    rows = run_points(endpoints, points, token_ids, workers=workers, warm=warm, keep_itl=keep_itl, on_point=on_point)
    show(f"{kind}: times in ms", rows, LOAD_COLUMNS)
    content = document(kind, provenance(f"bench {kind}", flags_of(context, seed=seed)), engines=facts, points=rows)
    finish(content, out, warnings(rows))
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


def _endpoints(url: str | None, model: str | None, named: list[str], api_key: str | None) -> list[Endpoint]:
    """The servers that the flags name. Raises typer.BadParameter for none, two of a name, or what is no URL."""
    from pegainfer_server.bench.client import Endpoint
    from pegainfer_server.bench.engine_facts import only_model

    pairs = [("server", url)] if url is not None else []
    for text in named:
        match = re.fullmatch(r"([\w.-]+)=(https?://\S+)", text)
        if match is None:
            raise typer.BadParameter(f"--endpoint takes NAME=URL, got {text!r}")
        pairs.append((match[1], match[2]))
    if not pairs:
        raise typer.BadParameter("give --url or --endpoint")
    if len({name for name, _ in pairs}) < len(pairs):
        raise typer.BadParameter("every --endpoint needs a name of its own")
    try:
        return [Endpoint(name, root, model or only_model(root, api_key), api_key) for name, root in pairs]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    except PegainferError:
        raise


def _shares(text: str) -> list[float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise typer.BadParameter(f"--mix takes three numbers of 0 or more, not all 0, got {text!r}")
    return shares


def _integers(text: str, flag: str) -> list[int]:
    values = _numbers(text, flag)
    if any(value != int(value) for value in values):
        raise typer.BadParameter(f"{flag} takes whole numbers, got {text!r}")
    return [int(value) for value in values]


def _numbers(text: str, flag: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [0.0]
    if any(not 0 < value < float("inf") for value in values):
        raise typer.BadParameter(f"{flag} takes numbers above 0, separated by commas, got {text!r}")
    return values
