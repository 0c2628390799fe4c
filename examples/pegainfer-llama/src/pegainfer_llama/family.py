"""The family object: which checkpoints are Llama's, what core must know of one, and its module. Torch only in `build`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegainfer_core.chat import ChatFormat, TemplateChatFormat
from pegainfer_core.chat_syntax import hermes_syntax
from pegainfer_core.config import EngineConfig
from pegainfer_core.family import KVGroup, ModelFamily, ModelPlan, SupportCard
from pegainfer_core.hf_config import read_dtype, read_eos
from pegainfer_core.tokenizer import Tokenizer

from pegainfer_llama.config import LlamaConfig
from pegainfer_llama.weights import weight_rules

if TYPE_CHECKING:
    from pegainfer_core.model import BuildContext, Model

MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
LLAMA3_MARK = "<|start_header_id|>"


class LlamaFamily(ModelFamily):
    """Llama 2, Llama 3 and what shares their architecture, such as SmolLM2 and TinyLlama."""

    name = "llama"
    support = SupportCard(
        checkpoints=("HuggingFaceTB/SmolLM2-{135M,360M,1.7B}-Instruct", "meta-llama/Llama-2 and Llama-3, dense"),
        attention="GQA",
        precisions=("bfloat16", "float16", "float32"),
        features=("chunked prefill", "prefix cache", "linear, Llama 3 and YaRN rope"),
        tier="maturing",
    )

    def rejects(self, hf_config: Mapping[str, Any]) -> str | None:
        """None for model_type llama with the causal-LM class."""
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
        config = LlamaConfig.from_hf(hf_config, engine_config.ignore_config_keys)
        group = KVGroup(
            kind="full",
            layers=tuple(range(config.num_layers)),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        return ModelPlan(
            family=self.name,
            config=config,
            dtype=read_dtype(hf_config),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_context=config.rope.max_context(config.max_position_embeddings),
            eos_token_ids=read_eos(hf_config),
            kv_groups=(group,),
            weight_rules=weight_rules(config),
            # A buffer that Llama 2's files hold; it is computed from config.json.
            skipped_tensors=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        )

    def build(self, plan: ModelPlan, context: BuildContext) -> Model:
        """See ModelFamily."""
        from pegainfer_llama.model import LlamaModel

        return LlamaModel(plan.config, context)

    def chat_format(self, tokenizer: Tokenizer, path: Path) -> ChatFormat:
        """The checkpoint's own template. Calls are written as SmolLM2 does; Llama 3 has a syntax of its own, which is not read."""
        is_llama3 = tokenizer.token_id(LLAMA3_MARK) is not None
        return TemplateChatFormat(tokenizer, path, None if is_llama3 else hermes_syntax)
