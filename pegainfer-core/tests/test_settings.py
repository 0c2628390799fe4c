"""Settings and files with absurd numbers or other types: refused by name, at once, before memory is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pegainfer_core import LLM, ConfigError, RequestError, SamplingParams
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import PluginError
from pegainfer_core.hf_config import ConfigReader
from pegainfer_core.machine import machine_memory
from pegainfer_core.model import BuildContext
from pegainfer_core.testing.corrupt import edit_config
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen3.testing import write_tiny_qwen3

PAGE = 4 * 2 * 2 * 32 * 4 * 16
"""Bytes of one page of the tiny model: layers, keys and values, heads, head dim, float32, tokens."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": "100"}, "--max-model-len must be int | None, got '100'"),
        ({"max_model_len": 10.0}, "--max-model-len must be int | None, got 10.0"),
        ({"page_size": True}, "--page-size must be int, got True"),
        ({"prefix_cache": 1}, "--prefix-cache must be bool, got 1"),
        ({"gpu_memory_utilization": "0.9"}, "--gpu-memory-utilization must be float, got '0.9'"),
        ({"ignore_config_keys": "key"}, "--ignore-config-keys must be tuple[str, ...], got 'key'"),
        ({"options": {"a": 1}}, "--options must be dict[str, str], got {'a': 1}"),
        ({"device": None}, "--device must be str, got None"),
        ({"seed": 2**63}, "--seed must be a 64-bit integer, got 9223372036854775808"),
        ({"max_running_requests": 10**9}, "--max-running-requests must be at most 4096, got 1000000000"),
        ({"max_prefill_tokens": 10**9}, "--max-prefill-tokens must be at most 1048576, got 1000000000"),
        ({"page_size": 2**30}, "--page-size must be at most 65536, got 1073741824"),
    ],
)
def test_an_engine_setting_that_cannot_be_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="m", **settings)
    assert str(caught.value) == message


def test_the_model_is_a_text() -> None:
    with pytest.raises(ConfigError, match=r"^model must be str, got 7$"):
        EngineConfig(model=7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "hot", "temperature must be float, got 'hot'"),
        ("temperature", True, "temperature must be float, got True"),
        ("max_tokens", 1.5, "max_tokens must be int | None, got 1.5"),
        ("max_tokens", "5", "max_tokens must be int | None, got '5'"),
        ("top_k", 10**30, "top_k must be a 64-bit integer, got 1000000000000000000000000000000"),
        ("stop_token_ids", 7, "stop_token_ids must be tuple[int, ...], got 7"),
        ("logit_bias", {"1": 2}, "logit_bias must be dict[int, float], got {'1': 2}"),
        ("ignore_eos", 1, "ignore_eos must be bool, got 1"),
    ],
)
def test_a_sampling_field_of_another_type_is_refused_by_name(field: str, value: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert (str(caught.value), caught.value.param) == (message, field)


def test_an_int_is_a_float() -> None:
    assert SamplingParams(temperature=1, top_p=1).temperature == 1


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [
        ("num_hidden_layers", 10**9, 10_000),
        ("hidden_size", 10**9, 1_000_000),
        ("vocab_size", 10**9, 10_000_000),
        ("max_position_embeddings", 10**9, 100_000_000),
        ("anything_else", 2**31, 2**31 - 1),
    ],
)
def test_a_size_beyond_every_model_is_refused(key: str, value: int, most: int) -> None:
    reader = ConfigReader({key: value}, "x")
    with pytest.raises(ConfigError) as caught:
        reader.int(key)
    assert str(caught.value) == f"config.json: {key} is {value}; x takes at most {most}"
    assert ConfigReader({key: most}, "x").int(key) == most
    assert ConfigReader({key: value}, "x").int(key, maximum=value) == value


def test_more_cache_than_the_machine_has_memory_is_refused_before_loading(checkpoint: Path, tmp_path: Path) -> None:
    total = machine_memory()
    with pytest.raises(
        ConfigError, match=f"--kv-cache-memory {total + 1} is more than the {total} bytes .* this machine"
    ):
        LLM(str(checkpoint), device="cpu", kv_cache_memory=total + 1)
    limit = tmp_path / "memory.max"
    limit.write_text("1048576\n")
    assert machine_memory(limit) == 1 << 20
    limit.write_text("max\n")
    assert machine_memory(limit) == machine_memory(tmp_path / "absent")


def test_tables_are_as_long_as_the_pool_could_hold_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = write_tiny_qwen3(tmp_path / "long")
    edit_config(long, max_position_embeddings=100_000_000)
    contexts: list[BuildContext] = []
    build = Qwen3Family.build

    def spy(self: Qwen3Family, plan: Any, context: BuildContext) -> Any:
        contexts.append(context)
        return build(self, plan, context)

    monkeypatch.setattr(Qwen3Family, "build", spy)
    with LLM(str(long), device="cpu", kv_cache_memory=11 * PAGE) as llm:
        assert llm.info.max_model_len == 160
    with pytest.raises(ConfigError, match=r"--max-model-len 1000000 does not fit: the KV cache holds 160 tokens"):
        LLM(str(long), device="cpu", kv_cache_memory=11 * PAGE, max_model_len=1_000_000)
    assert [context.max_model_len for context in contexts] == [160]


def test_a_family_that_cannot_build_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise IndexError("layer 7")

    monkeypatch.setattr(Qwen3Family, "build", fails)
    with pytest.raises(
        PluginError, match=r"^family qwen3 \(pegainfer-qwen3 .*\) failed in build: IndexError: layer 7$"
    ):
        LLM(str(checkpoint))
    monkeypatch.setattr(Qwen3Family, "build", lambda *_: "model")
    with pytest.raises(PluginError, match=r"returned a str from build; it must be a Model$"):
        LLM(str(checkpoint))
    monkeypatch.undo()
    monkeypatch.setattr(Qwen3Family, "tokenizer", lambda *_: None)
    with pytest.raises(PluginError, match=r"returned a NoneType from tokenizer; it must be a Tokenizer$"):
        LLM(str(checkpoint))
