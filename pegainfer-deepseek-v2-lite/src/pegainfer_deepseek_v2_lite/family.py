"""The family object: which checkpoints are its own, what core must know of one, and its module. Torch only in `build`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pegainfer_core.config import EngineConfig
from pegainfer_core.family import KVGroup, ModelFamily, ModelPlan, SupportCard
from pegainfer_core.hf_config import read_dtype, read_eos

from pegainfer_deepseek_v2_lite.config import DeepseekV2LiteConfig
from pegainfer_deepseek_v2_lite.weights import SKIPPED_TENSORS, weight_rules

if TYPE_CHECKING:
    from pegainfer_core.model import BuildContext, Model

MODEL_TYPE = "deepseek_v2"
ARCHITECTURE = "DeepseekV2ForCausalLM"


class DeepseekV2LiteFamily(ModelFamily):
    """Decoders with latent attention, and mixtures of experts behind the first layers."""

    name = "deepseek-v2-lite"
    support = SupportCard(
        checkpoints=("deepseek-ai/DeepSeek-V2-Lite{,-Chat}", "deepseek-ai/DeepSeek-Coder-V2-Lite-{Base,Instruct}"),
        attention="MLA",
        precisions=("bfloat16", "float16", "float32"),
        features=("chunked prefill", "prefix cache", "YaRN", "mixture of experts"),
        tier="bring-up",
    )

    def rejects(self, hf_config: Mapping[str, Any]) -> str | None:
        """None for model_type deepseek_v2 with the causal-LM class."""
        model_type = hf_config.get("model_type")
        if model_type != MODEL_TYPE:
            return f"model_type is {model_type!r}, not {MODEL_TYPE!r}"
        architectures = hf_config.get("architectures")
        if architectures and ARCHITECTURE not in architectures:
            return f"architectures is {architectures!r}, not [{ARCHITECTURE!r}]"
        return None

    def plan(self, hf_config: Mapping[str, Any], engine_config: EngineConfig, options: Any) -> ModelPlan:
        """See ModelFamily."""
        del options  # this family has none
        config = DeepseekV2LiteConfig.from_hf(hf_config, engine_config.ignore_config_keys)
        group = KVGroup(
            kind="latent",
            layers=tuple(range(config.num_layers)),
            latent_rank=config.latent_rank,
            latent_rope_dim=config.rope_dim,
        )
        return ModelPlan(
            family=self.name,
            config=config,
            dtype=read_dtype(hf_config),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_context=config.max_context,
            eos_token_ids=read_eos(hf_config),
            kv_groups=(group,),
            weight_rules=weight_rules(config),
            skipped_tensors=SKIPPED_TENSORS,
        )

    def build(self, plan: ModelPlan, context: BuildContext) -> Model:
        """See ModelFamily."""
        from pegainfer_deepseek_v2_lite.model import DeepseekV2LiteModel

        return DeepseekV2LiteModel(plan.config, context)
