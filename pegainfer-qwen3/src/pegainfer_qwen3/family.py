"""The family object: which checkpoints are Qwen3, what core must know of one, and its module. Torch only in `build`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegainfer_core.chat import ChatFormat, TemplateChatFormat
from pegainfer_core.chat_syntax import qwen_json_syntax
from pegainfer_core.config import EngineConfig
from pegainfer_core.family import KVGroup, ModelFamily, ModelPlan, SupportCard
from pegainfer_core.hf_config import read_dtype, read_eos
from pegainfer_core.tokenizer import Tokenizer

from pegainfer_qwen3.config import Qwen3Config
from pegainfer_qwen3.weights import weight_rules

if TYPE_CHECKING:
    from pegainfer_core.model import BuildContext, Model

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3ForCausalLM"


class Qwen3Family(ModelFamily):
    """Dense Qwen3 decoders."""

    name = "qwen3"
    support = SupportCard(
        checkpoints=("Qwen/Qwen3-{0.6B,1.7B,4B,8B,14B,32B}", "Qwen/Qwen3-4B-{Instruct,Thinking}-2507"),
        attention="GQA",
        precisions=("bfloat16", "float16", "float32"),
        features=("chunked prefill", "prefix cache", "YaRN", "tools", "thinking"),
        tier="maturing",
    )

    def rejects(self, hf_config: Mapping[str, Any]) -> str | None:
        """None for model_type qwen3 with the causal-LM class."""
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
        config = Qwen3Config.from_hf(hf_config, engine_config.ignore_config_keys)
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
            max_context=config.max_context,
            eos_token_ids=read_eos(hf_config),
            kv_groups=(group,),
            weight_rules=weight_rules(config),
            # A buffer that old exports stored; it is computed from config.json.
            skipped_tensors=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        )

    def build(self, plan: ModelPlan, context: BuildContext) -> Model:
        """See ModelFamily."""
        from pegainfer_qwen3.model import Qwen3Model

        return Qwen3Model(plan.config, context)

    def chat_format(self, tokenizer: Tokenizer, path: Path) -> ChatFormat:
        """The checkpoint's own template; thinking between <think> marks, calls as JSON."""
        return TemplateChatFormat(tokenizer, path, qwen_json_syntax)
