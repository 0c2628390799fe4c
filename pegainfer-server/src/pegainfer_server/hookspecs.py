"""The hooks of the server. Same plugin project as core's: a plugin module may implement both.

Each is documented in docs/hooks.md and has a test; a test compares the three.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer
    from fastapi import FastAPI
    from pegainfer_core.client import EngineClient

hookspec = pluggy.HookspecMarker("pegainfer")


@hookspec
def pegainfer_add_commands(app: typer.Typer) -> None:
    """Add subcommands to `pegainfer`.

    Called once, before the command line is parsed. Import nothing heavy: `pegainfer --help` waits for this.
    """


@hookspec
def pegainfer_add_routes(app: FastAPI, client: EngineClient) -> None:
    """Add HTTP routes.

    Called once, before the server starts; the engine may still be loading (`client.state`). API keys and X-Request-Id apply to
    added routes as to the server's own, which cannot be replaced.
    """
