"""Qwen3.5: a pre-norm decoder whose layers mix tokens by gated DeltaNet or by gated attention, each with a SwiGLU MLP.

Reads outside-in. Parameters are created on the meta device and filled by `weights.py`'s rules, which also bring rows of
queries and keys into the order that full rotation wants, and make norms of weights stored as the difference to 1.

Shape suffixes: T tokens of the step, R rows, E hidden size, F intermediate size, V vocabulary, H query heads, N all heads,
D head dim, P outputs of a stacked projection, X outputs of all heads side by side.
"""

from __future__ import annotations

import torch
from pegainfer_core.model import BuildContext, ForwardBatch, Model
from pegainfer_core.ops.activation import sigmoid_mul
from pegainfer_core.ops.gdn import GatedDeltaNetWeights, gated_delta_net
from pegainfer_core.ops.heads import rotate_and_attend
from pegainfer_core.ops.linear import Embedding, Linear, linear_add, norm_gated_linear, norm_linear
from pegainfer_core.ops.norm import RMSNorm
from pegainfer_core.ops.rope import RotaryTable
from torch import Tensor, nn

from pegainfer_qwen35.config import Qwen35Config

NORM_DTYPE = torch.float32
"""1 + weight would lose digits of the weight in a narrower type."""


class Qwen35Model(Model):
    """Embedding, blocks, final norm, and the projection to the vocabulary."""

    def __init__(self, config: Qwen35Config, context: BuildContext) -> None:
        super().__init__()
        dtype = context.dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.rotary = RotaryTable(config.rope, config.head_dim, context.max_model_len, context.device)
        self.layers = nn.ModuleList(Block(config, layer, dtype) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, NORM_DTYPE)
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

    def __init__(self, config: Qwen35Config, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        mixer = Attention if config.full_attention[layer] else GatedDeltaNet
        self.mixer = mixer(config, layer, dtype)
        self.mlp = MLP(config, dtype)

    def forward(self, x_TE: Tensor, batch: ForwardBatch, rotary: RotaryTable) -> Tensor:
        """[T, E] to [T, E]; x is used up."""
        out_TE: Tensor = self.mlp(self.mixer(x_TE, batch, rotary))
        return out_TE


class GatedDeltaNet(nn.Module):
    """Mixes tokens through a recurrent state."""

    def __init__(self, config: Qwen35Config, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        delta, hidden = config.delta, config.hidden_size
        values = delta.num_value_heads * delta.value_dim
        self.norm = RMSNorm(hidden, config.rms_norm_eps, NORM_DTYPE)
        self.in_proj = Linear(hidden, delta.channels + values + 2 * delta.num_value_heads, dtype)
        self.delta = GatedDeltaNetWeights(
            delta.channels, delta.taps, delta.num_value_heads, delta.value_dim, config.rms_norm_eps, dtype
        )
        self.out_proj = Linear(values, hidden, dtype)

    def forward(self, x_TE: Tensor, batch: ForwardBatch, rotary: RotaryTable) -> Tensor:
        """x + what is read from the state, [T, E]; x is used up. The state knows the order of tokens: no rotation."""
        del rotary
        projected_TP = norm_linear(x_TE, self.norm, self.in_proj.weight)
        read_TX = gated_delta_net(projected_TP, self.delta, batch.states, self.layer, batch.positions_T)
        return linear_add(read_TX, self.out_proj.weight, x_TE)


class Attention(nn.Module):
    """Grouped-query attention with a norm of each query and key head, and a gate for each of its outputs."""

    def __init__(self, config: Qwen35Config, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.width = config.num_heads * config.head_dim
        key_values = 2 * config.num_kv_heads * config.head_dim
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, NORM_DTYPE)
        self.in_proj = Linear(config.hidden_size, 2 * self.width + key_values, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, NORM_DTYPE)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, NORM_DTYPE)
        self.out_proj = Linear(self.width, config.hidden_size, dtype)

    def forward(self, x_TE: Tensor, batch: ForwardBatch, rotary: RotaryTable) -> Tensor:
        """x + gated attention, [T, E]; x is used up."""
        projected_TP = norm_linear(x_TE, self.norm, self.in_proj.weight)
        gate_TX = projected_TP[:, : self.width]
        qkv_TND = projected_TP[:, self.width :].view(len(x_TE), -1, self.head_dim)
        norms = (self.q_norm, self.k_norm)
        attended_THD = rotate_and_attend(qkv_TND, norms, rotary, batch.positions_T, batch.attention, self.layer)
        return linear_add(sigmoid_mul(attended_THD.flatten(1), gate_TX), self.out_proj.weight, x_TE)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Qwen35Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, NORM_DTYPE)
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, dtype)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, dtype)

    def forward(self, x_TE: Tensor) -> Tensor:
        """x + MLP, [T, E]; x is used up."""
        hidden_TF = norm_gated_linear(x_TE, self.norm, self.gate_up_proj.weight)
        return linear_add(hidden_TF, self.down_proj.weight, x_TE)
