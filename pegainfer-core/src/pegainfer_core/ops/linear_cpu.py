"""Linear layers on a CPU: weights packed once, after loading, for the library that multiplies few rows by them fastest.

Owns the layouts, the choice among them, and the parameter that stands for a packed weight. A decode step reads every weight
once, so its time is that of their bytes. Knows no family.

Shape suffixes: O output features, I input features; leading dimensions of inputs are free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

Product = Callable[[Tensor], Tensor]
"""x [..., I] to x @ weight^T [..., O], in x's type."""

HALF_ERROR = 2.0**-25
"""Half the distance between the smallest float16 numbers. What a bfloat16 checkpoint holds is this close to a float16."""


class PackedWeight(nn.Parameter):
    """Stands for a weight [O, I] whose values are in a library's own layout: itself a meta tensor, without values."""

    product: Product
    num_bytes: int
    """What the packed values take."""

    def __new__(cls, weight_OI: Tensor) -> PackedWeight:
        """Pack. The given tensor is not needed afterwards."""
        packed: PackedWeight = super().__new__(cls, torch.empty_like(weight_OI.data, device="meta"), False)
        packed.product, itemsize = _pack(weight_OI.data)
        packed.num_bytes = weight_OI.numel() * itemsize
        return packed


def pack_linears(model: nn.Module) -> int:
    """Pack the weight of every `Linear`; afterwards nothing but `linear` may use it. A table tied to one stays as it is.

    Returns the bytes that the model's parameters take then.
    """
    from pegainfer_core.ops.linear import Linear

    owners: dict[int, list[Linear]] = {}
    for module in model.modules():
        if isinstance(module, Linear):
            owners.setdefault(id(module.weight), []).append(module)

    def pack(modules: list[Linear]) -> None:
        packed = PackedWeight(modules[0].weight)
        for module in modules:
            module.weight = packed  # frees the one before

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(pack, owners.values()))
    parameters = list(model.parameters())
    return sum(p.num_bytes if isinstance(p, PackedWeight) else p.numel() * p.element_size() for p in parameters)


def _pack(weight_OI: Tensor) -> tuple[Product, int]:
    """The product, and bytes a value. Two bytes wherever the CPU's units or the checkpoint allow it without rounding."""
    if weight_OI.dtype == torch.bfloat16 and has_native_bfloat16():
        return _onednn(weight_OI), 2
    if _has_half_weights() and _fits_half(weight_OI):
        return _half_weights(weight_OI), 2
    if weight_OI.dtype == torch.float32 and _has_onednn():
        return _onednn(weight_OI), 4
    return functools.partial(torch.nn.functional.linear, weight=weight_OI), weight_OI.element_size()


def _onednn(weight_OI: Tensor) -> Product:
    """oneDNN's blocked layout: no reordering per call, and the matrix units for bfloat16."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, 1)
    product = torch.ops.mkldnn._linear_pointwise

    def multiply(x: Tensor) -> Tensor:
        out: Tensor = product(x, packed, None, "none", [], "")
        return out

    return multiply


def _half_weights(weight_OI: Tensor) -> Product:
    """FBGEMM: weights in float16, everything else in float32."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight_OI.float(), None)
    product = torch.ops.quantized.linear_dynamic_fp16

    def multiply(x: Tensor) -> Tensor:
        out: Tensor = product(x, packed)
        return out

    def multiply_converted(x: Tensor) -> Tensor:
        return multiply(x.float()).to(x.dtype)

    return multiply if weight_OI.dtype == torch.float32 else multiply_converted


def _fits_half(weight_OI: Tensor) -> bool:
    """Whether float16 holds these values."""
    if weight_OI.dtype == torch.float16:
        return True
    return bool((weight_OI.half().to(weight_OI.dtype) - weight_OI).abs().max() <= HALF_ERROR)  # inf - x is not


@functools.cache
def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware and oneDNN uses it."""
    return _has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


@functools.cache
def _has_half_weights() -> bool:
    """Whether this build of torch multiplies by float16 weights (FBGEMM, on x86), and gets a product right."""
    try:
        return torch.equal(_half_weights(torch.eye(4, 3))(torch.eye(3)), torch.eye(3, 4))
    except (RuntimeError, AttributeError):  # no such engine, no such operator
        return False
