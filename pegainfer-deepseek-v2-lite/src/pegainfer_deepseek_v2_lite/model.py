"""DeepSeek-V2-Lite: a pre-norm decoder with latent attention, and mixtures of experts behind the first, dense layers.

Reads outside-in. Parameters are created on the meta device and filled by `weights.py`'s rules.

Shape suffixes: T tokens of the step, R rows, E hidden size, F intermediate size, V vocabulary, H heads, D head dim of queries and keys,
X a latent vector beside the shared key, P outputs of a stacked projection.
"""

from __future__ import annotations

import torch
from pegainfer_core.model import BuildContext, ForwardBatch, Model
from pegainfer_core.ops.activation import silu_mul
from pegainfer_core.ops.linear import Embedding, Linear, linear, linear_add, norm_gated_linear, norm_linear
from pegainfer_core.ops.mla import LatentAttention
from pegainfer_core.ops.moe import Experts, Router
from pegainfer_core.ops.norm import RMSNorm
from pegainfer_core.ops.rope import RotaryTable
from torch import Tensor, nn

from pegainfer_deepseek_v2_lite.config import LATENT_NORM_EPS, DeepseekV2LiteConfig


class DeepseekV2LiteModel(Model):
    """Embedding, blocks, final norm, and the projection to the vocabulary."""

    def __init__(self, config: DeepseekV2LiteConfig, context: BuildContext) -> None:
        super().__init__()
        dtype = context.dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.rotary = RotaryTable(config.rope, config.rope_dim, context.max_model_len, context.device)
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

    def __init__(self, config: DeepseekV2LiteConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention = Attention(config, layer, dtype)
        self.mlp = MLP(config, dtype) if layer < config.num_dense_layers else Mixture(config, dtype)

    def forward(self, x_TE: Tensor, batch: ForwardBatch, rotary: RotaryTable) -> Tensor:
        """[T, E] to [T, E]; x is used up."""
        out_TE: Tensor = self.mlp(self.attention(x_TE, batch, rotary))
        return out_TE


class Attention(nn.Module):
    """Latent attention; queries come from the hidden state, or from a normed vector between."""

    def __init__(self, config: DeepseekV2LiteConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.key_dim + config.rope_dim
        rows = config.latent_rank + config.rope_dim
        queries = config.num_heads * self.head_dim
        self.widths = [config.query_rank or queries, rows]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.in_proj = Linear(config.hidden_size, sum(self.widths), dtype)
        self.query_norm: RMSNorm | None = None
        if config.query_rank is not None:
            self.query_norm = RMSNorm(config.query_rank, LATENT_NORM_EPS, dtype)
            self.query_proj = Linear(config.query_rank, queries, dtype)
        self.latent = LatentAttention(
            layer,
            num_heads=config.num_heads,
            rank=config.latent_rank,
            key_dim=config.key_dim,
            rope_dim=config.rope_dim,
            value_dim=config.value_dim,
            scale=config.softmax_scale,
            eps=LATENT_NORM_EPS,
            dtype=dtype,
        )
        self.out_proj = Linear(config.num_heads * config.value_dim, config.hidden_size, dtype)

    def forward(self, x_TE: Tensor, batch: ForwardBatch, rotary: RotaryTable) -> Tensor:
        """x + attention, [T, E]; x is used up."""
        projected_TP = norm_linear(x_TE, self.norm, self.in_proj.weight)
        query_TP, rows_TX = torch.split(projected_TP, self.widths, dim=-1)
        if self.query_norm is not None:
            query_TP = norm_linear(query_TP.contiguous(), self.query_norm, self.query_proj.weight)
        q_THD = query_TP.view(len(x_TE), -1, self.head_dim)
        attended_TP = self.latent(q_THD, rows_TX, rotary, batch)
        return linear_add(attended_TP, self.out_proj.weight, x_TE)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DeepseekV2LiteConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, dtype)

    def forward(self, x_TE: Tensor) -> Tensor:
        """x + MLP, [T, E]; x is used up."""
        hidden_TF = norm_gated_linear(x_TE, self.norm, self.gate_up_proj.weight)
        return linear_add(hidden_TF, self.down_proj.weight, x_TE)


class Mixture(nn.Module):
    """Experts that a router chooses, and shared ones that every token goes to."""

    def __init__(self, config: DeepseekV2LiteConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, shared = config.hidden_size, config.experts.shared_intermediate_size
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype)
        self.router = Router(hidden, config.experts.rule)
        self.experts = Experts(config.experts.rule.num_experts, hidden, config.experts.intermediate_size, dtype)
        self.shared_gate_up_proj = Linear(hidden, 2 * shared, dtype)
        self.shared_down_proj = Linear(shared, hidden, dtype)

    def forward(self, x_TE: Tensor) -> Tensor:
        """x + what the experts give, [T, E]."""
        normed_TE = self.norm(x_TE)
        routed_TE = self.experts(normed_TE, *self.router(normed_TE))
        shared_TF = silu_mul(linear(normed_TE, self.shared_gate_up_proj.weight))
        return x_TE + linear_add(shared_TF, self.shared_down_proj.weight, routed_TE)
