"""Weights that came through page-locked buffers are, bit for bit, those that a plain load gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pegainfer_core.config import EngineConfig
from pegainfer_core.family import ModelPlan
from pegainfer_core.model import BuildContext
from pegainfer_core.stored_tensors import stored_tensors
from pegainfer_core.testing.tiny import write_tiny_checkpoint
from pegainfer_core.weight_transfer import Move, transfer
from pegainfer_core.weights import load_weights
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen3.testing import tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor

pytestmark = pytest.mark.gpu

WIDE = {"hidden_size": 512, "intermediate_size": 1536, "vocab_size": 20_000, "num_hidden_layers": 3}


def expected_parameters(plan: ModelPlan, path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read whole files on the CPU, stack and cast there."""
    stored = {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    parameters: dict[str, Tensor] = {}
    for rule in sorted(plan.weight_rules, key=lambda rule: rule.tied_to is not None):
        parts = [stored[source.name] for source in rule.sources if source.name in stored]
        parameters[rule.parameter] = torch.cat(parts).to(dtype) if parts else parameters[str(rule.tied_to)]
    return parameters


@pytest.mark.parametrize("stored_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shard_bytes", [None, 9_000_000])
def test_staged_load_is_the_plain_load(
    tmp_path: Path, stored_dtype: str, dtype: torch.dtype, shard_bytes: int | None
) -> None:
    config = tiny_config(torch_dtype=stored_dtype, **WIDE)
    family = Qwen3Family()
    write_tiny_checkpoint(tmp_path, family, config, shard_bytes=shard_bytes)
    plan = family.plan(config, EngineConfig(model=str(tmp_path)), family.options())
    device = torch.device("cuda", 0)
    for _ in range(2):  # the second time into memory that was in use before
        with torch.device("meta"):
            model = family.build(plan, BuildContext(device=device, dtype=dtype, max_model_len=64))
        load_weights(model, plan, tmp_path, device, dtype)
        expected = expected_parameters(plan, tmp_path, dtype)
        found = dict(model.named_parameters(remove_duplicate=False))
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            assert parameter.device == device and parameter.dtype is dtype, name
            assert torch.equal(parameter.cpu().view(torch.uint8), expected[name].view(torch.uint8)), name
        del model, found


@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_small_chunks_reuse_their_buffers(tmp_path: Path, wanted: torch.dtype) -> None:
    value = torch.randn(3, 700_001, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file({"t": value}, tmp_path / "model.safetensors")
    source = stored_tensors(tmp_path)["t"]
    destination = torch.full((3, 700_001), 7.0, dtype=wanted, device="cuda")
    transfer([Move(source, destination)], torch.device("cuda", 0), lambda _: None, chunk_bytes=4096, num_threads=3)
    assert torch.equal(destination.cpu(), value.to(wanted))


def test_buffers_go_back_to_the_system(tmp_path: Path) -> None:
    """Page-locked memory that torch's own allocator took would stay."""
    save_file({"t": torch.zeros(64 << 20, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    source = stored_tensors(tmp_path)["t"]
    destination = torch.ones(64 << 20, dtype=torch.bfloat16, device="cuda")
    device = torch.device("cuda", 0)
    transfer([Move(source, destination)], device, lambda _: None)
    before = _resident_bytes()
    for _ in range(4):
        transfer([Move(source, destination)], device, lambda _: None)
    assert _resident_bytes() - before < 64 << 20, "each transfer uses 128 MiB of buffers"
    assert not destination.any()


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
