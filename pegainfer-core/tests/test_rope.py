"""Rotary tables against transformers for every rope type, in both spellings, far beyond the original context."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pegainfer_core.hf_config import ConfigReader, read_rope
from pegainfer_core.ops.rope import RotaryTable, apply_rope, inverse_frequencies
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

POSITIONS = [0, 1, 2, 63, 64, 127, 1000, 4095, 4096, 40959, 131071]

SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "default, spelled out": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, no original": {"rope_type": "yarn", "factor": 2.0},
    "yarn, betas": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 64,
        "beta_slow": 2,
    },
    "yarn, narrow ramp": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 1,
        "beta_slow": 1,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "attention_factor": 0.9,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def config_of(name: str, theta: float, spelling: str) -> dict[str, Any]:
    scaling = copy.copy(SCALINGS[name])  # transformers adds keys to it
    config: dict[str, Any] = {"max_position_embeddings": 40960}
    if spelling == "rope_parameters":
        return config | {"rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})}}
    if spelling == "type" and scaling is not None:
        scaling = {"type": scaling["rope_type"], **{key: scaling[key] for key in scaling if key != "rope_type"}}
    return config | {"rope_theta": theta, "rope_scaling": scaling}


def table_of(config: dict[str, Any], head_dim: int, num_positions: int) -> RotaryTable:
    reader = ConfigReader(config, "test")
    reader.int("max_position_embeddings")
    rope = read_rope(reader)
    reader.finish()
    return RotaryTable(rope, head_dim, num_positions, torch.device("cpu"))


@pytest.mark.parametrize(
    ("theta", "head_dim", "spelling"),
    [(10000.0, 64, "rope_scaling"), (1e6, 128, "rope_parameters"), (500000.0, 32, "type")],
)
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers(name: str, theta: float, head_dim: int, spelling: str) -> None:
    config = config_of(name, theta, spelling)
    table = table_of(config, head_dim, max(POSITIONS) + 1)
    shape: dict[str, Any] = {
        "hidden_size": 4 * head_dim,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
    }
    reference = Qwen3RotaryEmbedding(Qwen3Config(**shape, **config))
    cos, sin = reference(torch.zeros(1, dtype=torch.float32), torch.tensor([POSITIONS]))
    for found, expected in ((table.cos_CN[POSITIONS], cos[0]), (table.sin_CN[POSITIONS], sin[0])):
        assert found.dtype is torch.float32
        assert torch.equal(torch.cat((found, found), dim=-1), expected)


def test_llama_reads_the_same_tables() -> None:
    config = config_of("llama3", 500000.0, "rope_scaling")
    shape: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    reference = LlamaRotaryEmbedding(LlamaConfig(**shape, **config))
    cos, _ = reference(torch.zeros(1, dtype=torch.float32), torch.tensor([POSITIONS]))
    assert torch.equal(table_of(config, 64, max(POSITIONS) + 1).cos_CN[POSITIONS], cos[0, :, :32])


def test_the_reference_tells_the_types_apart() -> None:
    tables = [table_of(config_of(name, 1e6, "rope_scaling"), 128, 50_000).cos_CN[-1] for name in SCALINGS]
    assert len({tuple(table.tolist()) for table in tables}) == len(SCALINGS) - 1, "only default is there twice"


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotation_is_that_of_transformers(dtype: torch.dtype) -> None:
    table = table_of(config_of("yarn", 1e6, "rope_scaling"), 32, 5000)
    q_THD, k_TKD = random(6, 4, 32, dtype=dtype), random(6, 2, 32, dtype=dtype, seed=1)
    positions_T = torch.tensor([7, 8, 9, 0, 4999, 4096])
    cos, sin = (torch.cat((part, part), dim=-1)[positions_T].to(dtype) for part in (table.cos_CN, table.sin_CN))
    expected = apply_rotary_pos_emb(q_THD, k_TKD, cos, sin)
    for found, reference in zip(table(q_THD, k_TKD, positions_T), expected, strict=True):
        assert found.dtype is dtype
        assert torch.equal(found, reference)


def test_each_token_has_its_own_position() -> None:
    table = table_of(config_of("default", 1e4, "rope_scaling"), 16, 100)
    q_THD, k_TKD = random(4, 2, 16), random(4, 1, 16, seed=1)
    positions = [50, 3, 3, 99]
    together = table(q_THD, k_TKD, torch.tensor(positions))
    for row, position in enumerate(positions):
        alone = table(q_THD[row : row + 1], k_TKD[row : row + 1], torch.tensor([position]))
        assert torch.equal(together[0][row], alone[0][0])
        assert torch.equal(together[1][row], alone[1][0])


def test_position_zero_changes_nothing_and_inputs_stay() -> None:
    table = table_of(config_of("default", 1e4, "rope_scaling"), 16, 4)
    q_THD, k_TKD = random(2, 2, 16), random(2, 1, 16, seed=1)
    copies = q_THD.clone(), k_TKD.clone()
    found = apply_rope(q_THD, k_TKD, torch.tensor([0, 0]), table.cos_CN, table.sin_CN)
    assert torch.equal(found[0], q_THD)
    assert torch.equal(found[1], k_TKD)
    table(q_THD, k_TKD, torch.tensor([1, 3]))
    assert torch.equal(q_THD, copies[0])
    assert torch.equal(k_TKD, copies[1])


def test_tables_are_no_part_of_a_checkpoint() -> None:
    table = table_of(config_of("default", 1e4, "rope_scaling"), 16, 4)
    assert not table.state_dict()
    with torch.device("meta"):
        built = table_of(config_of("yarn", 1e4, "rope_scaling"), 16, 4)
    assert not built.cos_CN.is_meta


def test_frequencies_have_no_factor_but_for_yarn() -> None:
    for name, scaling in SCALINGS.items():
        reader = ConfigReader(config_of(name, 1e6, "rope_scaling"), "test")
        _, factor = inverse_frequencies(read_rope(reader), 64)
        assert (factor == 1.0) is (scaling is None or scaling["rope_type"] != "yarn"), name
