"""`pegainfer inspect`: what would be served, and whether it could be.

Owns the report. No weights are read and none are downloaded; the checks are `dry_start.py`'s, the arithmetic `footprint.py`'s, the picture
`graph_picture.py`'s.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import ConfigError

from pegainfer_server.flags import with_engine_flags
from pegainfer_server.footprint import Device, Footprint, footprint, readable_bytes

if TYPE_CHECKING:
    from collections.abc import Collection

    from pegainfer_core.family import ModelPlan
    from pegainfer_core.resolve import ResolvedModel


GRAPH_CONTEXT = 1024
"""Tokens of the request in the picture of a step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything the command shows."""

    model: str
    family: str
    package: str
    checkpoint_dtype: str
    layers: int
    hidden_size: int
    vocab_size: int
    context: int
    kv_groups: tuple[dict[str, Any], ...]
    page_size: int
    tensors: int
    """Tensors found in the checkpoint's files; 0 if the weights are not here."""
    footprints: tuple[Footprint, ...]


@with_engine_flags()
def inspect(
    config: EngineConfig,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    graph: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Also draw one decode step: operations, shapes, memory traffic."),
    ] = None,
) -> None:
    """Show what would be served.

    Takes the engine flags of `serve` and tells memory, pages and the longest request. Flags, names and shapes of tensors, tokenizer, chat
    template and generation config are checked as at a start. Reads no weights, and downloads none.
    """
    if graph is not None and graph.suffix != ".svg":
        raise typer.BadParameter(f"--graph {graph}: only SVG pictures are drawn; give a name that ends in .svg")
    from pegainfer_core.plugins import load_plugins

    from pegainfer_server.dry_start import dry_start

    resolved, present = dry_start(config, load_plugins())
    report = make_report(config, resolved, present)
    for warning in resolved.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if graph is not None:
        draw_step(config, resolved, graph)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        _print(report)


def make_report(config: EngineConfig, resolved: ResolvedModel, present: Collection[str] | None) -> Report:
    """What the model would take; `present` are the tensors in its files, None if there are none."""
    plan = resolved.plan
    footprints = [
        footprint(plan, device, dtype, config=config, present=present) for device, dtype in targets(config, plan)
    ]
    return Report(
        model=config.model,
        family=resolved.family.name,
        package=resolved.package,
        checkpoint_dtype=plan.dtype,
        layers=plan.num_layers,
        hidden_size=plan.hidden_size,
        vocab_size=plan.vocab_size,
        context=plan.max_context,
        kv_groups=tuple(dataclasses.asdict(group) for group in plan.kv_groups),
        page_size=config.page_size,
        tensors=len(present or ()),
        footprints=tuple(footprints),
    )


def draw_step(config: EngineConfig, resolved: ResolvedModel, file: Path) -> None:
    """Trace a decode step of one request and write its picture. Raises ConfigError, also if the file cannot be written."""
    from pegainfer_core.step_graph import trace_decode_step  # imports torch

    from pegainfer_server.graph_picture import draw, headline

    plan = resolved.plan
    _, dtype = targets(config, plan)[-1]
    context = min(GRAPH_CONTEXT, plan.max_context, config.max_model_len or plan.max_context)
    graph = trace_decode_step(resolved.family, plan, dtype, rows=1, context=context)
    try:
        file.write_text(draw(graph), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--graph {file} cannot be written: {error.strerror or error}") from error
    typer.echo(f"{file}: {headline(graph)}", err=True)


def targets(config: EngineConfig, plan: ModelPlan) -> list[tuple[Device, str]]:
    """Devices to show, each with the type it would serve in; both kinds unless --device says which."""
    devices: tuple[Device, ...] = ("cpu", "cuda")
    if config.device == "cpu":
        devices = ("cpu",)
    elif config.device.startswith("cuda"):
        devices = ("cuda",)
    automatic = {"cpu": "float32", "cuda": plan.dtype}
    return [(device, automatic[device] if config.dtype == "auto" else config.dtype) for device in devices]


def _at_start(count: int | None) -> str:
    return "measured at start" if count is None else readable_bytes(count)


def _print(report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    facts = Table.grid(padding=(0, 2))
    shape = f"{report.layers} layers of {report.hidden_size}, {report.vocab_size} ids, context {report.context}"
    rows = {"model": report.model, "family": f"{report.family} ({report.package})", "shape": shape}
    rows["checkpoint"] = f"{report.checkpoint_dtype}, " + (
        f"{report.tensors} tensors" if report.tensors else "weights are not here"
    )
    for group in report.kv_groups:
        window = f", window {group['window']}" if group["window"] else ""
        held = f"{group['num_kv_heads']} heads of {group['head_dim']}"
        if group["latent_rank"]:
            held = f"{group['latent_rank']} latent values and a shared key of {group['latent_rope_dim']}"
        if group["state"]:
            held = ", ".join(f"{tensor['name']} {'x'.join(map(str, tensor['shape']))}" for tensor in group["state"])
        rows[f"KV {group['kind']}"] = f"{len(group['layers'])} layers, {held}{window}"
    for name, text in rows.items():
        facts.add_row(name, text)
    console.print(facts)
    table = Table(box=box.SIMPLE)
    table.add_column("Memory")
    for target in report.footprints:
        table.add_column(f"{target.device}, {target.dtype}", justify="right")
    for index, part in enumerate(report.footprints[0].parts):
        table.add_row(part.name, *(readable_bytes(target.parts[index].bytes) for target in report.footprints))
    table.add_section()
    table.add_row("weights", *(readable_bytes(target.weight_bytes) for target in report.footprints))
    table.add_row("KV cache per token", *(readable_bytes(target.kv_bytes_per_token) for target in report.footprints))
    kv_bytes = [target.kv_bytes for target in report.footprints]
    table.add_row("KV cache", *(_at_start(count) for count in kv_bytes))
    if any(target.state_bytes_per_request for target in report.footprints):
        per_request = [readable_bytes(target.state_bytes_per_request) for target in report.footprints]
        table.add_row("recurrent state per request", *per_request)
        table.add_row("recurrent states", *(_at_start(target.state_bytes) for target in report.footprints))
    table.add_section()
    pages = [target.pages for target in report.footprints]
    table.add_row(f"pages of {report.page_size} tokens", *("-" if count is None else str(count) for count in pages))
    longest = [target.longest_request for target in report.footprints]
    table.add_row("longest request (tokens)", *("-" if count is None else str(count) for count in longest))
    console.print(table)
