"""Llama: a pre-norm decoder with grouped-query attention and a SwiGLU MLP.

Reads outside-in. Parameters are created on the meta device and filled by the rules of `weights.py`.

Shape suffixes: T tokens of the step, R rows, E hidden size, V vocabulary, H query heads, K key/value heads, N all heads,
D head dim.
"""

from __future__ import annotations

import torch
from pegainfer_core.model import BuildContext, ForwardBatch, Model
from pegainfer_core.ops.activation import silu_mul
from pegainfer_core.ops.linear import Embedding, Linear
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
    """One layer."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, layer, dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype)

    def forward(self, x_TE: Tensor, batch: ForwardBatch, rotary: RotaryTable) -> Tensor:
        """[T, E] to [T, E]."""
        attended_TE = self.attention(self.attention_norm(x_TE), batch, rotary)
        normed_TE, residual_TE = self.mlp_norm.add(attended_TE, x_TE)
        out_TE: Tensor = residual_TE + self.mlp(normed_TE)
        return out_TE


class Attention(nn.Module):
    """Grouped-query attention over the pages of each request."""

    def __init__(self, config: LlamaConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.qkv_proj = Linear(config.hidden_size, sum(self.heads) * config.head_dim, dtype)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, dtype)

    def forward(self, x_TE: Tensor, batch: ForwardBatch, rotary: RotaryTable) -> Tensor:
        """[T, E] to [T, E]."""
        qkv_TND = self.qkv_proj(x_TE).unflatten(-1, (-1, self.head_dim))
        q_THD, k_TKD, v_TKD = qkv_TND.split(self.heads, dim=1)
        q_THD, k_TKD = rotary(q_THD, k_TKD, batch.positions_T)
        attended_THD = batch.attention.run(self.layer, q_THD, k_TKD, v_TKD)
        out_TE: Tensor = self.o_proj(attended_THD.flatten(1))
        return out_TE


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, dtype)

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, E] to [T, E]."""
        out_TE: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x_TE)))
        return out_TE
