"""The `pegainfer` command: which subcommands there are, and how an error looks.

Owns the typer application and `main`. Imports nothing heavy: the work of a command is imported when it runs. Plugins are
loaded first, because they may add commands; loading them is import-light by contract.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from pegainfer_core.errors import PegainferError

from pegainfer_server.commands import bench, chat, doctor, generate, inspect, models, serve, warmup

EPILOG = "`pegainfer --model-path DIR [FLAGS]` is the same as `pegainfer serve DIR [FLAGS]`."

app = typer.Typer(
    name="pegainfer",
    help="Serve large language models over the OpenAI API.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes cut long flag names at 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("warmup")(warmup.warmup)
app.command("models")(models.models)
app.command("inspect")(inspect.inspect)
app.command("doctor")(doctor.doctor)
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        import pegainfer_core

        typer.echo(f"pegainfer {pegainfer_core.__version__}")
        raise typer.Exit


@app.callback()
def _pegainfer(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0, 1 for an error (one line on stderr), 2 for wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        add_plugin_commands(app)
        app(expand_alias(given), prog_name="pegainfer")
    except PegainferError as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except SystemExit as error:  # typer's way to end: the code is already right
        return error.code if isinstance(error.code, int) else 1
    return 0


def expand_alias(arguments: list[str]) -> list[str]:
    """`--model-path DIR [FLAGS]` without a subcommand as `serve DIR [FLAGS]`; anything else unchanged."""
    if not arguments or not arguments[0].startswith("-"):
        return arguments
    for index, argument in enumerate(arguments):
        if argument == "--model-path" and index + 1 < len(arguments):
            return ["serve", arguments[index + 1], *arguments[:index], *arguments[index + 2 :]]
        if argument.startswith("--model-path="):
            return ["serve", argument.partition("=")[2], *arguments[:index], *arguments[index + 1 :]]
    return arguments


def add_plugin_commands(app: typer.Typer) -> None:
    """Let plugins add theirs. One that fails is told on stderr, and the rest works."""
    from pegainfer_core.plugins import load_plugins

    for implementation in load_plugins().implementations("pegainfer_add_commands"):
        try:
            implementation(app=app)
        except Exception as error:  # a plugin's mistake must not take the other commands away
            typer.echo(f"warning: plugin {implementation.plugin} could not add its commands: {error!r}", err=True)


if __name__ == "__main__":
    sys.exit(main())
