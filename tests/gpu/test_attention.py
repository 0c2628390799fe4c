"""The Triton attention kernels on a GPU, against float64: values, graph capture, no waiting for the device."""

import dataclasses
import random

import pytest
import torch
from pegainfer_core.ops.attention import AttentionBackend
from pegainfer_core.ops.attention_torch import TorchAttention
from pegainfer_core.ops.attention_triton import SplitRule, TritonAttention
from pegainfer_core.testing.paged_attention import PagedBatch, paged_batch
from torch import Tensor

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# relative error; tf32 in the place of float32 would show as 3e-4
LIMITS = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 5e-6}
DTYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)


def run(batch: PagedBatch, backend: AttentionBackend) -> Tensor:
    """Run with torch.empty filled with NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    try:
        return batch.run(backend)
    finally:
        torch.use_deterministic_algorithms(False)


def error(batch: PagedBatch, backend: AttentionBackend | None = None) -> float:
    reference = batch.reference()
    out = run(batch, backend or TritonAttention(CUDA))
    return float((out - reference).norm() / reference.norm())


@DTYPES
def test_decode_rows_of_every_length(dtype: torch.dtype) -> None:
    rows = [(1, context) for context in (1, 15, 16, 17, 63, 64, 65, 1000, 4096, 8192)]
    assert error(paged_batch(rows, heads=(32, 8), head_dim=128, page_size=16, dtype=dtype, device=CUDA)) < LIMITS[dtype]


@DTYPES
def test_one_long_decode_row(dtype: torch.dtype) -> None:
    batch = paged_batch([(1, 8191)], heads=(32, 8), head_dim=128, page_size=16, dtype=dtype, device=CUDA)
    assert error(batch) < LIMITS[dtype]
    assert (
        error(batch, TritonAttention(CUDA, SplitRule(programs=1, shortest=64, longest=1 << 20, most=1))) < LIMITS[dtype]
    )


@DTYPES
def test_a_large_decode_batch(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    rows = [(1, rng.randint(1, 2048)) for _ in range(128)]
    assert error(paged_batch(rows, heads=(32, 8), head_dim=128, page_size=16, dtype=dtype, device=CUDA)) < LIMITS[dtype]


@DTYPES
def test_prompts_and_chunks(dtype: torch.dtype) -> None:
    rows = [(1000, 1000), (2, 2), (513, 8192), (16, 4096), (17, 33), (1, 700), (300, 301)]
    assert error(paged_batch(rows, heads=(32, 8), head_dim=128, page_size=16, dtype=dtype, device=CUDA)) < LIMITS[dtype]


@DTYPES
def test_mixed_batches(dtype: torch.dtype) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        rows = [(1, rng.randint(1, 5000)) for _ in range(rng.randint(1, 40))]
        for _ in range(rng.randint(1, 5)):
            new = rng.randint(2, 400)
            rows.append((new, new + rng.choice([0, rng.randint(1, 3000)])))
        batch = paged_batch(rows, heads=(32, 8), head_dim=128, page_size=16, dtype=dtype, device=CUDA, seed=seed)
        assert error(batch) < LIMITS[dtype], rows


@DTYPES
@pytest.mark.parametrize("heads", [(4, 4), (16, 8), (40, 8), (64, 8), (16, 1)], ids=str)
def test_head_groups(heads: tuple[int, int], dtype: torch.dtype) -> None:
    rows = [(1, 77), (1, 1500), (130, 200), (40, 1000)]
    assert error(paged_batch(rows, heads=heads, head_dim=128, page_size=16, dtype=dtype, device=CUDA)) < LIMITS[dtype]


@DTYPES
@pytest.mark.parametrize(("head_dim", "page_size"), [(16, 1), (64, 16), (80, 64), (96, 16), (192, 32), (256, 16)])
def test_head_dims_and_page_sizes(head_dim: int, page_size: int, dtype: torch.dtype) -> None:
    rows = [(1, 77), (1, 1500), (130, 200), (40, 1000)]
    batch = paged_batch(rows, heads=(8, 2), head_dim=head_dim, page_size=page_size, dtype=dtype, device=CUDA)
    assert error(batch) < LIMITS[dtype]


@DTYPES
def test_the_torch_backend_on_the_gpu(dtype: torch.dtype) -> None:
    batch = paged_batch([(1, 77), (130, 200)], heads=(8, 2), head_dim=128, page_size=16, dtype=dtype, device=CUDA)
    reference = batch.reference()
    assert float((batch.run(TorchAttention()) - reference).norm() / reference.norm()) < LIMITS[dtype]


@DTYPES
def test_same_inputs_same_bits(dtype: torch.dtype) -> None:
    rows = [(1, 3000), (1, 20), (300, 900)]
    batch = paged_batch(rows, heads=(32, 8), head_dim=128, page_size=16, dtype=dtype, device=CUDA)
    first = run(batch, TritonAttention(CUDA))
    for _ in range(20):
        assert torch.equal(run(batch, TritonAttention(CUDA)), first)


def test_no_launch_waits_for_the_device() -> None:
    rows = [(1, 3000), (1, 20), (300, 900)]
    batch = paged_batch(rows, heads=(32, 8), head_dim=128, page_size=16, dtype=torch.bfloat16, device=CUDA)
    backend = TritonAttention(CUDA)
    batch.run(backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch.run(backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def device_tensors(batch: PagedBatch) -> list[Tensor]:
    metadata = batch.metadata
    return [
        batch.q_THD,
        batch.k_TKD,
        batch.v_TKD,
        *batch.caches,
        metadata.context_lens_R,
        metadata.page_table_RP,
        metadata.write_index_T,
    ]


@DTYPES
@pytest.mark.parametrize("contexts", [[3, 500, 4000], [4000]], ids=["ragged", "single"])
def test_a_captured_launch_serves_other_contexts(contexts: list[int], dtype: torch.dtype) -> None:
    def batch_of(lengths: list[int], seed: int) -> PagedBatch:
        rows = [(1, length) for length in lengths]
        batch = paged_batch(rows, heads=(32, 8), head_dim=128, page_size=16, dtype=dtype, device=CUDA, seed=seed)
        return dataclasses.replace(batch, metadata=dataclasses.replace(batch.metadata, max_context_len=16384))

    captured, other = batch_of(contexts, 0), batch_of(contexts[::-1], 1)
    backend = TritonAttention(CUDA)
    captured.run(backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.run(backend)
    for static, new in zip(device_tensors(captured), device_tensors(other), strict=True):
        static.copy_(new)
    graph.replay()
    reference = other.reference()
    assert float((out - reference).norm() / reference.norm()) < LIMITS[dtype]
