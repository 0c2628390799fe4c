"""GGUF to a Hugging Face style checkpoint: config, weights, tokenizer, chat template.

Owns the translation of a Llama GGUF file with a byte-level BPE tokenizer, and nothing more general: what it does not
know is an error. Reading and dequantising are the `gguf` library's. Every number in config.json comes from the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BLOCK_TENSORS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
CONTROL = 3  # gguf token type of special tokens

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


class GgufFile:
    """A GGUF file by key and by tensor name."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def value(self, key: str) -> Any:
        """A metadata value. Raises ValueError if the file lacks the key."""
        field = self.reader.get_field(key)
        if field is None:
            raise ValueError(f"the GGUF file has no key {key}")
        return field.contents()

    def number(self, key: str) -> float:
        """A float32 value as the shortest decimal that means the same float32 (1e-05, not 9.999999747378752e-06)."""
        return float(str(np.float32(self.value(key))))


def convert(source: Path, destination: Path, progress: Progress) -> None:
    """Write the checkpoint of the GGUF file `source` into the existing directory `destination`."""
    file = GgufFile(source)
    for key, supported in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if file.value(key) != supported:
            raise ValueError(f"{key} is {file.value(key)!r}; supported is {supported!r}")
    config = model_config(file)
    tensors = {}
    total = len(file.tensors)
    for name, tensor in weights(file, config):
        tensors[name] = tensor
        progress(len(tensors), total)
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    _write_json(destination / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(destination / "generation_config.json", special)
    tokenizer(file).save(str(destination / "tokenizer.json"))
    _write_json(destination / "tokenizer_config.json", tokenizer_config(file, config))
    (destination / "chat_template.jinja").write_text(file.value("tokenizer.chat_template"), encoding="utf-8")


def model_config(file: GgufFile) -> dict[str, Any]:
    """config.json with the keys that published Llama checkpoints have."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.value("tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "hidden_size": file.value("llama.embedding_length"),
        "intermediate_size": file.value("llama.feed_forward_length"),
        "max_position_embeddings": file.value("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": file.value("llama.attention.head_count"),
        "num_hidden_layers": file.value("llama.block_count"),
        "num_key_value_heads": file.value("llama.attention.head_count_kv"),
        "pad_token_id": file.value("tokenizer.ggml.padding_token_id"),
        "rms_norm_eps": file.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_scaling": None,
        "rope_theta": file.number("llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": file.value("llama.vocab_size"),
    }


def weights(file: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and bfloat16 tensor of every parameter. Raises ValueError if the file has fewer tensors, or more."""
    num_layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, num_layers)
    wanted = ["model.embed_tokens", "model.norm"]
    wanted += [f"model.layers.{layer}.{name}" for layer in range(num_layers) for name in BLOCK_TENSORS]
    if not config["tie_word_embeddings"]:
        wanted.append("lm_head")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    unused = set(file.tensors)
    for name in wanted:
        source = f"{names.get_name(name)}.weight"
        if source not in file.tensors:
            raise ValueError(f"the GGUF file has no tensor {source} (for {name})")
        unused.remove(source)
        array = dequantize(file.tensors[source].data, file.tensors[source].tensor_type)
        num_heads = heads.get(name.rpartition(".")[2])
        if num_heads is not None:
            array = split_rotary_halves(array, num_heads)
        yield f"{name}.weight", torch.from_numpy(np.array(array)).to(torch.bfloat16)
    if unused:
        raise ValueError(f"the GGUF file has tensors that a Llama checkpoint does not: {', '.join(sorted(unused))}")


def split_rotary_halves(array: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of a q or k projection in checkpoint order. GGUF interleaves the two halves that rotary embedding pairs."""
    rows, columns = array.shape
    return array.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def tokenizer(file: GgufFile) -> Tokenizer:
    """Byte-level BPE as SmolLM2 has it: each digit on its own, then the pattern of GPT-2."""
    tokens: list[str] = file.value("tokenizer.ggml.tokens")
    types: list[int] = file.value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    return made


def tokenizer_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """tokenizer_config.json; the chat template has a file of its own."""
    tokens = file.value("tokenizer.ggml.tokens")
    return {
        "add_prefix_space": False,
        "bos_token": tokens[config["bos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[config["eos_token_id"]],
        "model_max_length": config["max_position_embeddings"],
        "pad_token": tokens[config["pad_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[file.value("tokenizer.ggml.unknown_token_id")],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=True) + "\n", encoding="utf-8")
