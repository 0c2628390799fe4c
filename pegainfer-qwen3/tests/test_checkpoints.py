"""Tiny checkpoints are what they claim to be, and long prompts under YaRN still follow transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pegainfer_core.testing.engine_driver import EngineDriver
from pegainfer_core.testing.paged_model import PagedModel
from pegainfer_core.testing.reference import mean_logprob_difference, transformers_logits
from pegainfer_core.testing.tiny import write_tiny_checkpoint
from pegainfer_core.testing.tiny_tokenizer import CHAT_TEMPLATE, EOS_ID, SPECIAL_TOKENS, VOCAB_SIZE, tiny_tokenizer
from pegainfer_qwen3.family import Qwen3Family
from pegainfer_qwen3.testing import tiny_config, write_tiny_qwen3
from safetensors.torch import load_file
from tokenizers import Tokenizer


def test_weights_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    single = load_file(write_tiny_qwen3(tmp_path / "single") / "model.safetensors")
    path = write_tiny_qwen3(tmp_path / "sharded", shard_bytes=100_000)
    files = sorted(path.glob("*.safetensors"))
    sharded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    other = load_file(write_tiny_qwen3(tmp_path / "other", seed=1) / "model.safetensors")
    assert single.keys() == sharded.keys() == other.keys()
    assert len(files) > 3
    assert all(torch.equal(single[name], sharded[name]) for name in single)
    assert not any(torch.equal(single[name], other[name]) for name in single)


def test_the_index_names_every_tensor_and_the_size(tmp_path: Path) -> None:
    path = write_tiny_qwen3(tmp_path, shard_bytes=100_000)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    stored = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in stored.items() for name in tensors}
    sizes = [tensor.nbytes for tensors in stored.values() for tensor in tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_type_of_the_config(tmp_path: Path, dtype: str) -> None:
    tensors = load_file(write_tiny_qwen3(tmp_path, torch_dtype=dtype) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, dtype)}


def test_a_tied_head_is_written_on_request(tmp_path: Path) -> None:
    assert "lm_head.weight" not in load_file(write_tiny_qwen3(tmp_path / "without") / "model.safetensors")
    path = write_tiny_checkpoint(tmp_path / "with", Qwen3Family(), tiny_config(), write_tied=True)
    tensors = load_file(path / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_the_tokenizer_knows_every_byte_and_its_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(write_tiny_qwen3(tmp_path) / "tokenizer.json"))
    assert tokenizer.to_str() == tiny_tokenizer().to_str(), "training is deterministic"
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    text = "caf\u00e9 \U0001f600 \x00\x7f\n\t" + "".join(map(chr, range(32, 127)))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("a<|im_end|>").ids[-1] == EOS_ID


def test_transformers_reads_the_tokenizer_and_the_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(write_tiny_qwen3(tmp_path))
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.eos_token_id == EOS_ID
    text = "Hello world!"
    assert tokenizer(text)["input_ids"] == tiny_tokenizer().encode(text).ids


def test_greedy_output_is_varied(tmp_path: Path) -> None:
    (result,) = EngineDriver(write_tiny_qwen3(tmp_path)).generate([[5, 6, 7, 8]])
    assert len(set(result.token_ids)) >= 8


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_long_prompts_under_yarn(tmp_path: Path, factor: float) -> None:
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 256}
    path = write_tiny_qwen3(tmp_path, max_position_embeddings=1024, rope_scaling=scaling)
    prompt = torch.randint(3, 512, (1000,), generator=torch.Generator().manual_seed(3)).tolist()
    (expected_TV,) = transformers_logits(path, [prompt])
    found_TV = PagedModel(Qwen3Family(), path).logits(prompt, 300)
    assert mean_logprob_difference(found_TV, expected_TV) <= 1e-5
