"""Engine flags: every field has one, what they parse to, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import typer
from pegainfer_core.config import EngineConfig
from pegainfer_server.flags import (
    engine_config,
    engine_parameters,
    field_docs,
    flag_name,
    parse_size,
    with_engine_flags,
)
from pegainfer_server.sampling_flags import given_fields
from typer.testing import CliRunner

OTHER_VALUES: dict[str, tuple[list[str], Any]] = {
    "revision": (["--revision", "main"], "main"),
    "device": (["--device", "cuda:1"], "cuda:1"),
    "dtype": (["--dtype", "bfloat16"], "bfloat16"),
    "max_model_len": (["--max-model-len", "128"], 128),
    "max_prefill_tokens": (["--max-prefill-tokens", "32"], 32),
    "max_running_requests": (["--max-running-requests", "3"], 3),
    "max_waiting_requests": (["--max-waiting-requests", "0"], 0),
    "page_size": (["--page-size", "32"], 32),
    "kv_cache_memory": (["--kv-cache-memory", "4GiB"], 4 * 2**30),
    "gpu_memory_utilization": (["--gpu-memory-utilization", "0.5"], 0.5),
    "prefix_cache": (["--no-prefix-cache"], False),
    "state_snapshot_memory": (["--state-snapshot-memory", "1GiB"], 2**30),
    "state_snapshot_stride": (["--state-snapshot-stride", "512"], 512),
    "run_ahead": (["--no-run-ahead"], False),
    "cuda_graphs": (["--cuda-graphs"], True),
    "fused_ops": (["--no-fused-ops"], False),
    "attention_backend": (["--attention-backend", "torch"], "torch"),
    "profile_dir": (["--profile-dir", "traces"], "traces"),
    "seed": (["--seed", "7"], 7),
    "ignore_config_keys": (["--ignore-config-keys", "a", "--ignore-config-keys", "b"], ("a", "b")),
    "options": (["-o", "x=1", "-o", "y=a=b"], {"x": "1", "y": "a=b"}),
}
"""A value other than the default for every field; a new field must be added here."""


class Recorder:
    """A command that remembers the config it got."""

    def __init__(self, model_required: bool = True) -> None:
        self.app = typer.Typer(rich_markup_mode=None)
        self.config: EngineConfig | None = None

        @self.app.command()
        @with_engine_flags(model_required)
        def command(config: EngineConfig | None) -> None:
            self.config = config

    def run(self, *arguments: str) -> tuple[int, str]:
        """(exit code, what was printed)."""
        result = CliRunner().invoke(self.app, list(arguments))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.output


def test_every_field_has_a_flag_that_sets_it() -> None:
    assert set(OTHER_VALUES) | {"model"} == set(EngineConfig.__struct_fields__)
    for field, (arguments, value) in OTHER_VALUES.items():
        recorder = Recorder()
        assert recorder.run("m", *arguments) == (0, "")
        assert recorder.config == msgspec.structs.replace(EngineConfig(model="m"), **{field: value})


def test_without_flags_the_defaults_are_the_configs() -> None:
    recorder = Recorder()
    assert recorder.run("m") == (0, "")
    assert recorder.config == EngineConfig(model="m")


def test_every_flag_has_the_fields_docstring_as_help() -> None:
    docs = field_docs(EngineConfig)
    assert set(docs) == set(EngineConfig.__struct_fields__)
    recorder = Recorder()
    _, text = recorder.run("--help")
    words = " ".join(text.split())
    for parameter in engine_parameters():
        assert flag_name(parameter.name) in words
        assert docs[parameter.name].split()[0] in words
    assert "None" not in words, "Python's None means nothing to a shell"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "--page-size", "3"], "--page-size must be a power of two, got 3"),
        (["m", "--gpu-memory-utilization", "nan"], "--gpu-memory-utilization must be in (0, 1], got nan"),
        (["m", "--kv-cache-memory", "much"], "'much' is no size"),
        (["m", "--kv-cache-memory", "0"], "--kv-cache-memory must be at least 1"),
        (["m", "--dtype", "int4"], "int4"),
        (["m", "-o", "x"], "-o takes name=value, got 'x'"),
        (["m", "-o", "x=1", "-o", "x=2"], "-o x is given twice"),
        (["m", "--tensor-parallel", "2"], "No such option"),
        ([], "Missing argument 'MODEL'"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_what(arguments: list[str], message: str) -> None:
    code, text = Recorder().run(*arguments)
    assert code == 2
    assert message in text
    assert "Traceback" not in text


def test_a_command_may_do_without_a_model_but_not_with_engine_flags() -> None:
    recorder = Recorder(model_required=False)
    assert recorder.run() == (0, "")
    assert recorder.config is None
    code, text = recorder.run("--dtype", "float32")
    assert code == 2
    assert "--dtype needs a MODEL" in text


def test_the_model_is_not_taken_from_a_flag() -> None:
    defaults = {p.name: p.default for p in engine_parameters()}
    assert engine_config("dir", defaults) == EngineConfig(model="dir")
    assert engine_config(None, defaults) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("9007199254740993", 9007199254740993),
        ("4GiB", 4 * 2**30),
        ("4 gib", 4 * 2**30),
        ("1.5G", 1_500_000_000),
        ("512MB", 512 * 10**6),
        ("2TiB", 2 * 2**40),
        ("10k", 10_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "4 GiBs", "1.GiB", "nan", "4,5G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="no size"):
        parse_size(text)


def test_sampling_fields_are_checked_by_sampling_params() -> None:
    fields = given_fields(5, 0.0, None, None, ["min_p=0.5", "stop_token_ids=[1, 2]", "ignore_eos=true"])
    assert fields == {"max_tokens": 5, "temperature": 0.0, "min_p": 0.5, "stop_token_ids": [1, 2], "ignore_eos": True}


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (["nose=1"], "no sampling field 'nose'; there are .*top_k"),
        (["min_p=high"], "Expected `float`, got `str`"),
        (["min_p=2"], r"min_p must be in \[0, 1\]"),
        (["min_p=0.1", "min_p=0.2"], "-s min_p is given twice"),
        (["max_tokens=1"], "-s max_tokens and --max-tokens say the same thing"),
    ],
)
def test_wrong_sampling_fields_are_usage_errors(further: list[str], message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        given_fields(5, None, None, None, further)
