"""What every family must do: subclass `FamilyConformance` in a test module of the family's package.

    class TestQwen3(FamilyConformance):
        family = Qwen3Family()
        plugin = "pegainfer_qwen3.plugin"
        configs = {"tied": tiny_config(), "untied": tiny_config(tie_word_embeddings=False)}

Owns the checks, on tiny random checkpoints that are written for them. Needs pytest, and transformers for the default
reference. Knows no family.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from pegainfer_core.checkpoint import weight_files
from pegainfer_core.config import EngineConfig
from pegainfer_core.errors import CheckpointError, ConfigError
from pegainfer_core.family import ModelFamily
from pegainfer_core.family_options import check_options_class
from pegainfer_core.testing import corrupt
from pegainfer_core.testing.conformance_engine import EngineConformance
from pegainfer_core.testing.paged_model import PagedModel, plan_of
from pegainfer_core.testing.reference import mean_logprob_difference, top_gap, transformers_logits
from pegainfer_core.testing.tiny import write_tiny_checkpoint

FOREIGN_CONFIGS: tuple[Mapping[str, Any], ...] = (
    {},
    {"model_type": None},
    {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    {"model_type": "pegainfer_nothing", "architectures": ["NothingForCausalLM"]},
)
"""Nobody's config.json."""

PLAN_WITHOUT_TORCH = """
import importlib, json, sys
plugin, name, configs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
families = importlib.import_module(plugin).pegainfer_model_families()
family = next(family for family in families if family.name == name)
from pegainfer_core.config import EngineConfig
for config in configs:
    assert family.rejects(config) is None, family.rejects(config)
    family.plan(config, EngineConfig(model="model"), family.options())
heavy = [module for module in ("torch", "transformers", "triton") if module in sys.modules]
assert not heavy, f"planning imports {heavy}"
"""


class FamilyConformance(EngineConformance):
    """A subclass sets `family`, `plugin` and `configs`; pytest does the rest. Any check can be overridden."""

    family: ClassVar[ModelFamily]
    plugin: ClassVar[str]
    """Import path of the module that the entry point names."""
    configs: ClassVar[Mapping[str, Mapping[str, Any]]]
    """config.json of tiny checkpoints by a short name. Logits are compared for all, the rest is checked on the first."""
    foreign_configs: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """What the family must decline beside FOREIGN_CONFIGS: its nearest cousins."""
    page_size: ClassVar[int] = 16
    prompt_length: ClassVar[int] = 90
    """Tokens of the longest test prompt; enough for every path of the architecture to be taken."""
    tolerance: ClassVar[float] = 1e-5
    """Largest mean difference of log-probabilities, in nat, in float32. The project's own limit is 1e-4."""

    def reference(self, path: Path, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """float32 logits [tokens, V] of each prompt. Default: transformers."""
        return transformers_logits(path, prompts)

    # what the checks share

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each of `configs` where a check takes `config_name`."""
        if "config_name" in metafunc.fixturenames:
            metafunc.parametrize("config_name", list(self.configs), scope="class")

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A checkpoint of the first config; not to be changed."""
        return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), cls.family, cls.first_config())

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, checkpoint: Path) -> PagedModel:
        """The model of `checkpoint`."""
        return PagedModel(cls.family, checkpoint, page_size=cls.page_size)

    @classmethod
    def first_config(cls) -> Mapping[str, Any]:
        """The config that most checks use."""
        return next(iter(cls.configs.values()))

    def assert_same(self, found_TV: Tensor, expected_TV: Tensor) -> None:
        """Log-probabilities agree within `tolerance`, and the greedy choice wherever it is not close."""
        assert found_TV.shape == expected_TV.shape
        assert mean_logprob_difference(found_TV, expected_TV) <= self.tolerance
        top_T2 = expected_TV.topk(2).values
        clear_T = top_T2[:, 0] - top_T2[:, 1] > 1e-3
        assert torch.equal(found_TV.argmax(-1)[clear_T], expected_TV.argmax(-1)[clear_T])

    # the seam

    def test_claims_its_own_configs(self) -> None:
        """It serves what it says it serves."""
        for config in self.configs.values():
            assert self.family.rejects(config) is None

    def test_declines_foreign_configs_with_a_reason(self) -> None:
        """A one-line reason for every config that is not its own."""
        for config in (*FOREIGN_CONFIGS, *self.foreign_configs):
            reason = self.family.rejects(config)
            assert reason, f"{config} is not this family's"
            assert "\n" not in reason

    def test_claims_and_plans_without_torch(self) -> None:
        """Importing the plugin, claiming and planning leave torch, transformers and triton out."""
        configs = json.dumps(list(self.configs.values()))
        command = [sys.executable, "-c", PLAN_WITHOUT_TORCH, self.plugin, self.family.name, configs]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def test_refuses_an_unknown_config_key_unless_told_to_ignore_it(self) -> None:
        """config.json is read strictly; --ignore-config-keys makes a key as if absent."""
        config = {**self.first_config(), "pegainfer_unknown_key": 7}
        with pytest.raises(ConfigError, match="pegainfer_unknown_key"):
            self.family.plan(config, EngineConfig(model="model"), self.family.options())
        allowed = EngineConfig(model="model", ignore_config_keys=("pegainfer_unknown_key",))
        plan = self.family.plan(config, allowed, self.family.options())
        assert plan == self.family.plan(self.first_config(), EngineConfig(model="model"), self.family.options())

    def test_support_card_is_filled_in(self) -> None:
        """`pegainfer models` has something to print."""
        card = self.family.support
        assert card.checkpoints
        assert card.attention
        assert set(card.precisions) <= {"float32", "bfloat16", "float16"}
        assert card.precisions

    def test_options_are_typed_defaulted_and_documented(self) -> None:
        """Every -o option can be given as text, left out, and looked up."""
        check_options_class(self.family)
        for field in dataclasses.fields(self.family.options):
            assert field.metadata.get("help"), f"option {field.name} has no help text"

    # the plan

    def test_kv_groups_cover_each_layer_once(self, checkpoint: Path) -> None:
        """Core builds one cache per layer from the groups."""
        plan = plan_of(self.family, checkpoint)
        covered = sorted(layer for group in plan.kv_groups for layer in group.layers)
        assert covered == list(range(plan.num_layers))

    def test_weight_bytes_add_up(self, checkpoint: Path, model: PagedModel) -> None:
        """The plan knows the memory that weights take, and nothing stays on the meta device."""
        plan = plan_of(self.family, checkpoint)
        stored = weight_files(checkpoint)
        own = [rule for rule in plan.weight_rules if rule.tied_to is None or rule.sources[0].name in stored]
        assert model.num_bytes == sum(rule.num_values for rule in own) * 4
        assert sum(parameter.nbytes for parameter in model.model.parameters()) == model.num_bytes
        assert all(not parameter.is_meta for parameter in model.model.parameters())

    # weights

    def test_shards_load_like_one_file(self, tmp_path: Path, model: PagedModel) -> None:
        """Bit for bit."""
        write_tiny_checkpoint(tmp_path, self.family, self.first_config(), shard_bytes=100_000)
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        sharded = PagedModel(self.family, tmp_path, page_size=self.page_size)
        for name, parameter in model.model.named_parameters():
            assert torch.equal(parameter, sharded.model.get_parameter(name)), name

    def test_every_tensor_is_needed(self, tmp_path: Path) -> None:
        """A tensor that is gone is named."""
        for name in self.sample_tensors(tmp_path):
            path = write_tiny_checkpoint(tmp_path / f"without-{name}", self.family, self.first_config())
            corrupt.drop_tensor(path, name)
            with pytest.raises(CheckpointError, match=re.escape(name)):
                PagedModel(self.family, path)

    def test_no_tensor_is_ignored(self, tmp_path: Path) -> None:
        """A tensor that nobody declared is named."""
        write_tiny_checkpoint(tmp_path, self.family, self.first_config())
        corrupt.add_tensor(tmp_path, "model.nobodys.weight", beside=self.sample_tensors(tmp_path / "names")[0])
        with pytest.raises(CheckpointError, match=r"model\.nobodys\.weight"):
            PagedModel(self.family, tmp_path)

    def test_shapes_are_checked(self, tmp_path: Path) -> None:
        """A tensor of another shape is named."""
        for name in self.sample_tensors(tmp_path):
            path = write_tiny_checkpoint(tmp_path / f"reshaped-{name}", self.family, self.first_config())
            corrupt.reshape_tensor(path, name)
            with pytest.raises(CheckpointError, match=re.escape(name) + ".*shape"):
                PagedModel(self.family, path)

    @classmethod
    def sample_tensors(cls, scratch: Path) -> list[str]:
        """Names of a few tensors that must be in a checkpoint: the first ones (one layer at least) and the last."""
        path = write_tiny_checkpoint(scratch / "sample", cls.family, cls.first_config())
        rules = [rule for rule in plan_of(cls.family, path).weight_rules if rule.tied_to is None]
        names = [source.name for rule in rules for source in rule.sources]
        return [*names[:12], names[-1]]

    # numbers

    def test_logits_equal_the_reference(self, config_name: str, tmp_path: Path) -> None:
        """Teacher-forced, in float32."""
        path = write_tiny_checkpoint(tmp_path, self.family, self.configs[config_name])
        prompts = [self.prompt(), self.prompt(7, seed=1)]
        model = PagedModel(self.family, path, page_size=self.page_size)
        for prompt, expected_TV in zip(prompts, self.reference(path, prompts), strict=True):
            self.assert_same(model.logits(prompt), expected_TV)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_half_precision_stays_near_the_reference(self, dtype: str, checkpoint: Path) -> None:
        """Within the project's limits of the reference in float32."""
        if dtype not in self.family.support.precisions:
            pytest.skip(f"{self.family.name} does not claim {dtype}")
        prompt = self.prompt()
        (expected_TV,) = self.reference(checkpoint, [prompt])
        model = PagedModel(self.family, checkpoint, page_size=self.page_size, dtype=getattr(torch, dtype))
        gap = top_gap(model.logits(prompt), expected_TV)
        assert gap.mean <= 0.06
        assert gap.p99 <= 0.20
        assert gap.regret <= 0.20

    @pytest.mark.parametrize("extra", [None, 0, 1], ids=["1 and 3 tokens", "a page", "a page and one"])
    def test_chunked_prefill_equals_whole(self, extra: int | None, model: PagedModel) -> None:
        """The size of chunks does not show."""
        prompt = self.prompt(2 * self.page_size + 5)
        whole_TV = model.logits(prompt)
        for chunk in (1, 3) if extra is None else (self.page_size + extra,):
            self.assert_same(model.logits(prompt, chunk), whole_TV)

    def test_decode_equals_prefill_of_the_longer_prompt(self, model: PagedModel) -> None:
        """Token by token is the same law as all at once."""
        prompt = self.prompt()
        parts = [model.forward({"request": prompt[:-9]})["request"]]
        parts += [model.forward({"request": [token_id]})["request"] for token_id in prompt[-9:]]
        model.free("request")
        self.assert_same(torch.cat(parts), model.logits(prompt))

    def test_batch_equals_single(self, model: PagedModel) -> None:
        """Rows of one batch do not see each other, whatever mix of prefill and decode they are."""
        prompts = {f"request {length}": self.prompt(length, seed=length) for length in (2, 3, 17, 40)}
        heads = model.forward({name: prompt[: len(prompt) // 2 + 1] for name, prompt in prompts.items()})
        tails = {name: prompt[len(heads[name]) :] for name, prompt in prompts.items()}
        second = model.forward({name: token_ids for name, token_ids in tails.items() if token_ids})
        for name, prompt in prompts.items():
            model.free(name)
            found_TV = torch.cat([heads[name], second[name]]) if tails[name] else heads[name]
            self.assert_same(found_TV, model.logits(prompt))

    def test_tied_weights_are_shared_whether_stored_or_not(self, checkpoint: Path, tmp_path: Path) -> None:
        """A stored copy of a tied tensor takes no second memory."""
        tied = [rule for rule in plan_of(self.family, checkpoint).weight_rules if rule.tied_to is not None]
        if not tied:
            pytest.skip("the first config ties no weights")
        for write_tied in (False, True):
            path = tmp_path / str(write_tied)
            write_tiny_checkpoint(path, self.family, self.first_config(), write_tied=write_tied)
            loaded = PagedModel(self.family, path).model
            for rule in tied:
                assert rule.tied_to is not None
                assert loaded.get_parameter(rule.parameter) is loaded.get_parameter(rule.tied_to)
