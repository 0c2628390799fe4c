"""`pegainfer generate`: prompts in, completions out, without a server.

Owns the JSONL forms. An input line is a JSON string, or an object with `prompt` (text, or a list of token ids), sampling fields that win
over the flags, and an `id` of any kind that the output line repeats. Output lines are in the order of the input; a line that is
wrong ends the command before anything runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import PegainferError, RequestError
from pegainfer_core.sampling_params import SamplingParams

from pegainfer_server.flags import with_engine_flags
from pegainfer_server.sampling_flags import Further, MaxTokens, Temperature, TopK, TopP, given_fields, sampling_params

if TYPE_CHECKING:
    from pegainfer_core.llm import Completion

Prompt = str | list[int]
DEFAULT_MAX_TOKENS = 128


@with_engine_flags()
def generate(
    config: EngineConfig,
    prompt: Annotated[list[str], typer.Option(help="Prompt text; repeat for more.")] = [],  # noqa: B006 - typer copies it
    input_file: Annotated[
        str | None,
        typer.Option("--input", metavar="FILE", help="JSONL file of prompts; - reads standard input."),
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="JSONL file to write; default: standard output.")
    ] = None,
    max_tokens: MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    sampling: Further = [],  # noqa: B006
) -> None:
    """Complete prompts without a server.

    Prompts go to the model as they are; see `chat` for messages. With --prompt and no --output the texts are printed,
    else one JSON object a line. A line of --input is a JSON text, or an object with `prompt` (a text or token ids), perhaps
    an `id` that the output repeats, and perhaps sampling fields; a line that is wrong is named before anything runs.
    """
    if bool(prompt) == (input_file is not None):
        raise typer.BadParameter("give --prompt or --input (one of the two)")
    if output_file is not None and not output_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"--output {output_file}: there is no such directory")
    fields = given_fields(max_tokens, temperature, top_p, top_k, sampling)
    given = [Row(text, sampling_params(fields)) for text in prompt]
    rows = given if input_file is None else read_input(input_file, fields)
    completions = run(config, [row.prompt for row in rows], [row.params for row in rows])
    if input_file is None and output_file is None:
        for completion in completions:
            typer.echo(completion.text)
        return
    lines = [json.dumps(record(*item), ensure_ascii=False) for item in zip(rows, completions, strict=True)]
    text = "".join(f"{line}\n" for line in lines)
    if output_file is None:
        typer.echo(text, nl=False)
    else:
        output_file.write_text(text, encoding="utf-8")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of input."""

    prompt: Prompt
    params: SamplingParams
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the output repeats: nothing, or the id."""


def read_input(file: str, fields: dict[str, Any]) -> list[Row]:
    """Rows of a JSONL file (`-` is standard input). Raises PegainferError naming the line."""
    try:
        text = sys.stdin.buffer.read().decode() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PegainferError(f"--input {file} cannot be read: {error}") from error
    rows: list[Row] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            given = dict(entry) if isinstance(entry, dict) else {"prompt": entry}
            own = {"id": given.pop("id")} if "id" in given else {}
            prompt = _checked_prompt(given.pop("prompt", None))
            rows.append(Row(prompt, sampling_params({**fields, **given}), own))
        except (ValueError, RequestError) as error:
            raise PegainferError(f"--input {file} line {number}: {error}") from error
    if not rows:
        raise PegainferError(f"--input {file} holds no prompt")
    return rows


def _checked_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        value.encode()  # a lone surrogate is a UnicodeEncodeError
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return value
    raise ValueError("prompt must be a text or a list of token ids")


def run(config: EngineConfig, prompts: list[Prompt], params: list[SamplingParams]) -> list[Completion]:
    """Load the model and complete every prompt, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from pegainfer_server.local import open_llm
    from pegainfer_server.progress import showing_progress

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        with showing_progress(lines=False) as on_progress:
            llm = stack.enter_context(open_llm(config, on_progress))
        bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        task = stack.enter_context(bars).add_task("prompts", total=len(prompts))
        return llm.generate(prompts, params, on_finished=lambda _: bars.advance(task))


def record(row: Row, completion: Completion) -> dict[str, Any]:
    """One line of output."""
    entry: dict[str, Any] = {
        **row.own,
        "prompt": row.prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_token_id": completion.stop_token_id,
        "prompt_tokens": len(completion.prompt_ids),
        "cached_tokens": completion.num_cached_tokens,
        "output_tokens": completion.num_output_tokens,
    }
    if completion.logprobs is not None:
        entry["logprobs"] = _logprobs(completion.logprobs)
    if completion.prompt_logprobs is not None:
        entry["prompt_logprobs"] = _logprobs(completion.prompt_logprobs)
    return entry


def _logprobs(entries: Iterable[Any]) -> list[Any]:
    names = ("token_id", "logprob", "rank", "top")
    return [None if entry is None else {name: getattr(entry, name) for name in names} for entry in entries]
