"""`pegainfer models`: what the installed families serve, and which plugins are broken."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pegainfer_core.plugins import Plugins


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what the installed families serve."""
    from pegainfer_core.plugins import load_plugins

    plugins = load_plugins()
    if as_json:
        typer.echo(json.dumps(as_data(plugins), indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_lines=True)
    for title in ("Family", "Checkpoints", "Support"):
        table.add_column(title, overflow="fold")
    for family in as_data(plugins)["families"]:
        identity = f"{family['name']} ({family['tier']})\n{family['distribution']} {family['version']}"
        parts = [family["attention"], *family["precisions"], *family["features"], *family["parallelism"]]
        options = [f"-o {o['name']}={o['default']}: {o['help']} ({o['type']})" for o in family["options"]]
        table.add_row(identity, "\n".join(family["checkpoints"]), "\n".join([", ".join(parts), *options]))
    console = Console()
    if plugins.families:
        console.print(table)
    else:
        console.print("no family is installed; each is a package of its own, for example an extra of pegainfer")
    for broken in plugins.broken:
        console.print(f"broken: {broken}", style="red", markup=False, highlight=False)


def as_data(plugins: Plugins) -> dict[str, Any]:
    """Families with their support cards, and broken plugins, as JSON values."""
    from pegainfer_core.family_options import describe_options

    families: list[dict[str, Any]] = []
    for family in plugins.families:
        card = family.support
        distribution, version = plugins.family_origin(family)
        families.append(
            {
                "name": family.name,
                "checkpoints": list(card.checkpoints),
                "attention": card.attention,
                "precisions": list(card.precisions),
                "parallelism": list(card.parallelism),
                "features": list(card.features),
                "tier": card.tier,
                "options": [dataclasses.asdict(option) for option in describe_options(family)],
                "distribution": distribution,
                "version": version,
            }
        )
    broken = [
        {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version, "reason": plugin.reason}
        for plugin in plugins.broken
    ]
    return {"families": families, "broken": broken}
