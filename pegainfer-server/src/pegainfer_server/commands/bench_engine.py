"""Commands of `pegainfer bench` that start what they measure: an engine in this process, or a server in its own."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from pegainfer_core.config import EngineConfig

from pegainfer_server.commands.bench_common import (
    Out,
    Seed,
    TokenIds,
    flags_of,
    parse_shapes,
    require_extra,
)
from pegainfer_server.flags import with_engine_flags

Lengths = Annotated[str, typer.Option(metavar="IN/OUT", help="Prompt and output tokens.")]
THROUGHPUT_COLUMNS = (
    ("in/out", "shape"),
    ("prompts", "num_requests"),
    ("seconds", "seconds"),
    ("output tok/s", "output_tokens_s"),
    ("total tok/s", "total_tokens_s"),
    ("requests/s", "requests_s"),
)


@with_engine_flags()
def throughput(
    config: EngineConfig,
    lengths: Lengths = "1024/128",
    num_prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts, all submitted at once.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs, each with prompts of its own.")] = 3,
    token_ids: TokenIds = "1000:32000",  # type: ignore[assignment]  # the parser reads it
    bench_seed: Annotated[
        int | None, typer.Option(min=0, max=2**31 - 1, help="Seed of the prompts. Default: a new one.")
    ] = None,
    out: Out = None,
) -> None:
    """Measure offline generation: all prompts at once, no server."""
    require_extra()
    from pegainfer_core.sampling_params import SamplingParams

    from pegainfer_server.bench.provenance import provenance
    from pegainfer_server.bench.report import document, finish, show
    from pegainfer_server.bench.workload import Point, prompts
    from pegainfer_server.local import open_llm

    seed = secrets.randbits(31) if bench_seed is None else bench_seed
    ((input_tokens, output_tokens),) = parse_shapes(lengths)[:1]
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    rows: list[dict[str, Any]] = []
    with open_llm(config) as llm:
        for index in range(repeats + 1):  # the first is a warm-up
            point = Point(
                mode="closed",
                load=num_prompts,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                num_requests=num_prompts,
                seed=(seed, index),
            )
            many = prompts(point, token_ids)
            begun = time.perf_counter()
            completions = llm.generate(list(many), params)
            seconds = time.perf_counter() - begun
            tokens = sum(completion.num_output_tokens for completion in completions)
            assert tokens == num_prompts * output_tokens, "EOS is ignored"
            if index:
                rows.append(
                    point.as_json()
                    | {"shape": f"{input_tokens}/{output_tokens}", "seconds": round(seconds, 4)}
                    | {"output_tokens_s": round(tokens / seconds, 3)}
                    | {"total_tokens_s": round(num_prompts * (input_tokens + output_tokens) / seconds, 3)}
                    | {"requests_s": round(num_prompts / seconds, 3)}
                )
        info = msgspec.to_builtins(llm.info)
    show("offline throughput", rows, THROUGHPUT_COLUMNS)
    own = {"lengths": lengths, "prompts": num_prompts, "repeats": repeats, "token_ids": token_ids, "seed": seed}
    flags = {**own, "engine": msgspec.structs.asdict(config)}
    finish(document("throughput", provenance("bench throughput", flags), engines={"pegainfer": info}, runs=rows), out)


@with_engine_flags()
def step(
    config: EngineConfig,
    rows: Annotated[str, typer.Option(metavar="N,N,...", help="Requests that decode together.")] = "128",
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="Counted decode steps.")] = 64,
    traced_steps: Annotated[int, typer.Option(min=0, help="Further steps under a profiler, for the GPU's times.")] = 16,
    token_ids: TokenIds = "1000:32000",  # type: ignore[assignment]  # the parser reads it
    bench_seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the prompts.")] = 0,
    out: Out = None,
) -> None:
    """Measure the acts of a decode step on the host, and how long the GPU idles between steps."""
    require_extra()
    from pegainfer_server.bench.provenance import provenance
    from pegainfer_server.bench.report import document, finish, show
    from pegainfer_server.bench.step_bench import STEP_COLUMNS, run_steps

    counts = [int(part) for part in rows.split(",") if part.strip().isdigit()]
    if not counts or 0 in counts:
        raise typer.BadParameter(f"--rows takes whole numbers above 0, separated by commas, got {rows!r}")
    results, info = run_steps(
        config,
        counts,
        input_tokens=context,
        steps=steps,
        seed=bench_seed,
        token_ids=token_ids,
        traced_steps=traced_steps,
    )
    show("decode steps", results, STEP_COLUMNS)
    own = {"rows": rows, "context": context, "steps": steps, "traced_steps": traced_steps, "seed": bench_seed}
    flags = {**own, "token_ids": token_ids, "engine": msgspec.structs.asdict(config)}
    engines = {"pegainfer": msgspec.to_builtins(info)}
    finish(document("step", provenance("bench step", flags), engines=engines, steps=results), out)


def startup(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="Command of the server, after --.")],
    url: Annotated[str, typer.Option(help="Where the server will answer.")] = "http://127.0.0.1:8000",
    name: Annotated[str, typer.Option(help="What the results call it.")] = "server",
    repeats: Annotated[int, typer.Option(min=1, help="Starts.")] = 1,
    page_cache: Annotated[
        Literal["as-is", "cold", "warm"], typer.Option(help="State of --files in the page cache before a start.")
    ] = "as-is",
    files: Annotated[
        list[Path], typer.Option(exists=True, help="File or folder (weights, site-packages); repeat for more.")
    ] = [],  # noqa: B006 - typer copies it
    load: Annotated[
        str, typer.Option(metavar="N,IN/OUT", help="Requests in flight and their lengths before memory is read again.")
    ] = "32,1024/128",
    token_ids: TokenIds = "1000:32000",  # type: ignore[assignment]  # the parser reads it
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds a start may take.")] = 600.0,
    seed: Seed = None,
    out: Out = None,
) -> None:
    """Start a server: time to ready, memory of all its processes idle and after load, GPU memory."""
    require_extra("psutil")
    from pegainfer_server.bench.provenance import provenance
    from pegainfer_server.bench.report import document, finish, show
    from pegainfer_server.bench.startup_bench import STARTUP_COLUMNS, run_start
    from pegainfer_server.bench.workload import Point

    if page_cache != "as-is" and not files:
        raise typer.BadParameter("--page-cache cold and warm need --files")
    seed = secrets.randbits(31) if seed is None else seed
    in_flight, _, shape = load.partition(",")
    ((input_tokens, output_tokens),) = parse_shapes(shape)[:1]
    if not in_flight.isdigit() or int(in_flight) < 1:
        raise typer.BadParameter(f"--load takes N,IN/OUT, got {load!r}")
    rows = [
        run_start(
            name,
            command,
            url,
            page_cache=page_cache,
            files=files,
            load=Point(
                mode="closed",
                load=int(in_flight),
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                num_requests=2 * int(in_flight),
                seed=(seed, index),
            ),
            token_ids=token_ids,
            timeout=timeout,
        )
        for index in range(repeats)
    ]
    show("starts", rows, STARTUP_COLUMNS)
    flags = flags_of(context, seed=seed)
    finish(document("startup", provenance("bench startup", flags), starts=rows), out)
