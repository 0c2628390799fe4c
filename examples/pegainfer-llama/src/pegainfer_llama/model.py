"""Llama: a pre-norm decoder with grouped-query attention and a SwiGLU MLP.

Reads outside-in. Parameters are created on the meta device and filled by the rules of `weights.py`.

Shape suffixes: T tokens of the step, R rows, E hidden size, F intermediate size, V vocabulary, H query heads, N all heads,
D head dim.
"""

from __future__ import annotations

import torch
from pegainfer_core.model import BuildContext, ForwardBatch, Model
from pegainfer_core.ops.heads import rotate_and_attend
from pegainfer_core.ops.linear import Embedding, Linear, linear_add, norm_gated_linear, norm_linear
from pegainfer_core.ops.norm import RMSNorm
from pegainfer_core.ops.rope import RotaryTable
from torch import Tensor, nn

from pegainfer_llama.config import LlamaConfig


class LlamaModel(Model):
    """Embedding, blocks, final norm, and the projection to the vocabulary."""

    def __init__(self, config: LlamaConfig, context: BuildContext) -> None:
        super().__init__()
        dtype = context.dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.rotary = RotaryTable(config.rope, config.head_dim, context.max_model_len, context.device)
        self.layers = nn.ModuleList(Block(config, layer, dtype) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states after the last norm, [T, E]."""
        x_TE = self.embed_tokens(batch.token_ids_T)
        for block in self.layers:
            x_TE = block(x_TE, batch, self.rotary)
        normed_TE: Tensor = self.norm(x_TE)
        return normed_TE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits [R, V]."""
        logits_RV: Tensor = self.lm_head(hidden_RE)
        return logits_RV


class Block(nn.Module):
    """One layer. Each half normalises the residual stream and adds its result to it."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention = Attention(config, layer, dtype)
        self.mlp = MLP(config, dtype)

    def forward(self, x_TE: Tensor, batch: ForwardBatch, rotary: RotaryTable) -> Tensor:
        """[T, E] to [T, E]; x is used up."""
        out_TE: Tensor = self.mlp(self.attention(x_TE, batch, rotary))
        return out_TE


class Attention(nn.Module):
    """Grouped-query attention over the pages of each request."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        all_heads = config.num_heads + 2 * config.num_kv_heads
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.qkv_proj = Linear(config.hidden_size, all_heads * config.head_dim, dtype)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, dtype)

    def forward(self, x_TE: Tensor, batch: ForwardBatch, rotary: RotaryTable) -> Tensor:
        """x + attention, [T, E]; x is used up."""
        qkv_TND = norm_linear(x_TE, self.norm, self.qkv_proj.weight).view(len(x_TE), -1, self.head_dim)
        attended_THD = rotate_and_attend(qkv_TND, None, rotary, batch.positions_T, batch.attention, self.layer)
        return linear_add(attended_THD.flatten(1), self.o_proj.weight, x_TE)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, dtype)

    def forward(self, x_TE: Tensor) -> Tensor:
        """x + MLP, [T, E]; x is used up."""
        hidden_TF = norm_gated_linear(x_TE, self.norm, self.gate_up_proj.weight)
        return linear_add(hidden_TF, self.down_proj.weight, x_TE)
