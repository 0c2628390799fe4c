"""Qwen3.5 passes the conformance kit, in both published forms, at every length at which a chunk or the convolution ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pegainfer_core.testing.conformance import FamilyConformance
from pegainfer_core.testing.paged_model import PagedModel
from pegainfer_core.testing.tiny import write_tiny_checkpoint
from pegainfer_qwen35.family import Qwen35Family
from pegainfer_qwen35.testing import ROPE, tiny_config, tiny_text_config

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 127, 128, 129, 1000, 4097)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


class TestQwen35(FamilyConformance):
    family = Qwen35Family()
    plugin = "pegainfer_qwen35.plugin"
    configs = {
        "wrapper, tied, 2 value heads a key head": tiny_config(),
        "untied, 1 value head a key head": tiny_config(tie_word_embeddings=False, linear_num_value_heads=2),
        "bfloat16 checkpoint, 3 value heads a key head": tiny_config(dtype="bfloat16", linear_num_value_heads=6),
        "head dims that differ": tiny_config(linear_key_head_dim=16, linear_value_head_dim=8, head_dim=64),
        "text model alone": tiny_text_config(),
        "yarn": tiny_config(rope_parameters=ROPE | YARN, max_position_embeddings=128),
    }
    foreign_configs = (
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
        {"model_type": "qwen3_5_moe", "architectures": ["Qwen3_5MoeForConditionalGeneration"]},
        {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForSequenceClassification"]},
        {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]},
    )

    def test_lengths(self, checkpoint: Path) -> None:
        """Teacher-forced at every length where a chunk, a page or the convolution's window ends."""
        prompts = [self.prompt(length, seed=length) for length in LENGTHS]
        model = PagedModel(self.family, checkpoint, num_pages=300)
        for prompt, expected_TV in zip(prompts, self.reference(checkpoint, prompts), strict=True):
            self.assert_same(model.logits(prompt), expected_TV)

    def test_splits_at_every_offset(self, model: PagedModel) -> None:
        """A prompt of 70 tokens in two parts, and token by token from every offset on for a few tokens."""
        prompt = self.prompt(70)
        whole_TV = model.logits(prompt)
        for at in range(1, 70):
            parts = [model.forward({"request": prompt[:at]})["request"]]
            middle = min(at + 3, 70)
            parts += [model.forward({"request": [token_id]})["request"] for token_id in prompt[at:middle]]
            if middle < 70:
                parts.append(model.forward({"request": prompt[middle:]})["request"])
            model.free("request")
            self.assert_same(torch.cat(parts), whole_TV)

    def test_batch_of_mixed_lengths(self, model: PagedModel) -> None:
        """Requests begin, go on and end in different steps, in slots that others had before them."""
        prompts = {f"request {length}": self.prompt(length, seed=length) for length in (1, 2, 5, 64, 70, 130)}
        expected = {name: model.logits(prompt) for name, prompt in prompts.items()}
        sizes = {"request 1": 1, "request 2": 1, "request 5": 2, "request 64": 63, "request 70": 33, "request 130": 64}
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
        done = dict.fromkeys(prompts, 0)
        while done:
            rows = {name: prompts[name][done[name] : done[name] + sizes[name]] for name in done}
            for name, logits_TV in model.forward(rows).items():
                parts[name].append(logits_TV)
                done[name] += len(rows[name])
                if done[name] == len(prompts[name]):
                    model.free(name)
                    del done[name]
        for name, logits in parts.items():
            self.assert_same(torch.cat(logits), expected[name])


def test_tensors_of_the_vision_tower_and_of_the_drafter_are_skipped_by_name(tmp_path: Path) -> None:
    from pegainfer_core.errors import CheckpointError
    from pegainfer_core.testing import corrupt

    path = write_tiny_checkpoint(tmp_path, Qwen35Family(), tiny_config())
    beside = "model.language_model.norm.weight"
    for name in ("model.visual.blocks.0.norm1.weight", "mtp.layers.0.mlp.down_proj.weight", "mtp.norm.weight"):
        corrupt.add_tensor(path, name, beside=beside)
    PagedModel(Qwen35Family(), path)
    corrupt.add_tensor(path, "model.audio.norm.weight", beside=beside)
    with pytest.raises(CheckpointError, match=r"model\.audio\.norm\.weight"):
        PagedModel(Qwen35Family(), path)
