"""The family object: which checkpoints are Qwen3.5, what core must know of one, and its module. Torch only in `build`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegainfer_core.chat import ChatFormat, TemplateChatFormat
from pegainfer_core.chat_syntax import qwen_xml_syntax
from pegainfer_core.config import EngineConfig
from pegainfer_core.family import KVGroup, ModelFamily, ModelPlan, StateTensor, SupportCard
from pegainfer_core.hf_config import read_dtype, read_eos
from pegainfer_core.tokenizer import Tokenizer

from pegainfer_qwen35.config import TEXT_TYPE, WRAPPER_TYPE, Qwen35Config
from pegainfer_qwen35.weights import SKIPPED_TENSORS, weight_rules

if TYPE_CHECKING:
    from pegainfer_core.model import BuildContext, Model

ARCHITECTURES = {WRAPPER_TYPE: "Qwen3_5ForConditionalGeneration", TEXT_TYPE: "Qwen3_5ForCausalLM"}
MOE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")


class Qwen35Family(ModelFamily):
    """Dense Qwen3.5 decoders, text alone."""

    name = "qwen35"
    support = SupportCard(
        checkpoints=("Qwen/Qwen3.5-{0.8B,2B,4B,9B,27B}", "Qwen/Qwen3.8-27B"),
        attention="3 of 4 layers gated DeltaNet, the others gated GQA",
        precisions=("bfloat16", "float16", "float32"),
        features=("chunked prefill", "prefix cache", "YaRN", "tools", "thinking"),
        tier="maturing",
    )

    def rejects(self, hf_config: Mapping[str, Any]) -> str | None:
        """None for the published wrapper and for the text model alone, each with its class."""
        model_type = hf_config.get("model_type")
        if model_type in MOE_TYPES:
            return f"model_type is {model_type!r}: mixtures of experts are not served, dense Qwen3.5 models are"
        if model_type not in ARCHITECTURES:
            return f"model_type is {model_type!r}, not {WRAPPER_TYPE!r} or {TEXT_TYPE!r}"
        architectures = hf_config.get("architectures")
        wanted = ARCHITECTURES[model_type]
        if architectures and wanted not in architectures:
            return f"architectures is {architectures!r}, not [{wanted!r}]"
        return None

    def plan(self, hf_config: Mapping[str, Any], engine_config: EngineConfig, options: Any) -> ModelPlan:
        """See ModelFamily."""
        del options  # this family has none
        config = Qwen35Config.from_hf(hf_config, engine_config.ignore_config_keys)
        text = hf_config.get("text_config") or {}
        own_types = {key: text[key] for key in ("dtype", "torch_dtype") if text.get(key)}
        return ModelPlan(
            family=self.name,
            config=config,
            dtype=read_dtype(own_types or hf_config),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_context=config.max_context,
            eos_token_ids=read_eos(hf_config) | read_eos(text),
            kv_groups=_groups(config),
            weight_rules=weight_rules(config),
            skipped_tensors=SKIPPED_TENSORS,
        )

    def build(self, plan: ModelPlan, context: BuildContext) -> Model:
        """See ModelFamily."""
        from pegainfer_qwen35.model import Qwen35Model

        return Qwen35Model(plan.config, context)

    def chat_format(self, tokenizer: Tokenizer, path: Path) -> ChatFormat:
        """The checkpoint's template, with XML tool calls and <think>."""
        return TemplateChatFormat(tokenizer, path, syntax=qwen_xml_syntax)


def _groups(config: Qwen35Config) -> tuple[KVGroup, ...]:
    """Pages for the attention layers, state for the others."""
    delta = config.delta
    layers = range(config.num_layers)
    full = KVGroup(
        kind="full",
        layers=tuple(layer for layer in layers if config.full_attention[layer]),
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    state = KVGroup(
        kind="state",
        layers=tuple(layer for layer in layers if not config.full_attention[layer]),
        state=(
            StateTensor(name="conv", shape=(delta.taps, delta.channels)),
            StateTensor(
                name="recurrent", shape=(delta.num_value_heads, delta.key_dim, delta.value_dim), dtype="float32"
            ),
        ),
    )
    return tuple(group for group in (full, state) if group.layers)
