"""`pegainfer warmup`: pay for a model's first start now, for example when an image is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from pegainfer_core.config import EngineConfig

from pegainfer_server.flags import with_engine_flags

if TYPE_CHECKING:
    from pegainfer_core.warm_up import WarmedUp


@with_engine_flags()
def warmup(config: EngineConfig) -> None:
    """Do ahead of time what the first start of MODEL would pay for.

    Takes the engine flags of `serve`; give the same ones, because kernels depend on them. Compiles the kernels, captures every graph once
    and computes a few requests. Compiled kernels stay in $PEGAINFER_CACHE/triton (~/.cache/pegainfer/triton).
    """
    from pegainfer_core.warm_up import warm_up

    from pegainfer_server.progress import showing_progress

    with showing_progress() as on_progress:
        done = warm_up(config, on_progress)
    for line in summary(done):
        typer.echo(line)


def summary(done: WarmedUp) -> list[str]:
    """What was done, in a few lines."""
    from pegainfer_server.footprint import readable_bytes
    from pegainfer_server.progress import describe, timeline

    seconds = sum(length for _, length in done.timeline)
    lines = [describe(done.info), timeline(seconds, done.timeline)]
    lines.append(f"{done.num_requests} requests computed in {done.num_steps} steps")
    if done.info.device.startswith("cuda"):
        compiled = done.after.num_kernels - done.before.num_kernels
        cache = f"{done.after.num_kernels} in {done.after.folder} ({readable_bytes(done.after.num_bytes)})"
        lines.append(f"{compiled} kernels compiled now, {cache}")
    else:
        lines.append("nothing is compiled for a CPU; the weights are in the page cache")
    return lines
