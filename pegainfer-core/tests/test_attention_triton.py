"""The Triton attention kernels on CPU tensors, in Triton's interpreter (conftest.py turns it on), and their compilation.

The interpreter's bfloat16 is wrong, so values are checked in float32 and float16 here and in bfloat16 by tests/gpu.
"""

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from pegainfer_core.ops.attention import make_attention_backend
from pegainfer_core.ops.attention_torch import TorchAttention
from pegainfer_core.ops.attention_triton import SplitRule, TritonAttention
from pegainfer_core.testing.latent_attention import latent_batch
from pegainfer_core.testing.paged_attention import PagedBatch, paged_batch

CPU = torch.device("cpu")
WHOLE = SplitRule(programs=1, shortest=16, longest=1 << 20, most=1)
MANY = SplitRule(programs=1 << 20, shortest=16, longest=32, most=7)

EDGES = [(1, 15), (1, 16), (1, 17), (1, 1), (15, 15), (16, 16), (17, 17), (2, 17), (1, 40)]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill what torch.empty returns with NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def error(batch: PagedBatch, rule: SplitRule | None = None, scale: float | None = None) -> float:
    """Relative error against float64, over the whole batch."""
    reference = batch.reference(scale)
    out = batch.run(TritonAttention(CPU, rule), scale)
    assert out.dtype == batch.q_THD.dtype
    assert out.shape == batch.q_THD.shape
    return float((out - reference).norm() / reference.norm())


@pytest.mark.parametrize("rule", [None, WHOLE, MANY], ids=["default", "whole", "split"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (5, 1), (8, 1)], ids=["group1", "group2", "group5", "group8"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_batch_at_page_edges(heads: tuple[int, int], page_size: int, rule: SplitRule | None) -> None:
    decode = [row for row in EDGES if row[0] == 1]
    rest = [row for row in EDGES if row[0] > 1]
    batch = paged_batch(decode + rest + [(1, 33)], heads=heads, head_dim=16, page_size=page_size)
    assert batch.metadata.num_decode_rows == len(decode)
    assert error(batch, rule) < 1e-6


@pytest.mark.parametrize("rule", [None, WHOLE, MANY], ids=["default", "whole", "split"])
@pytest.mark.parametrize(("heads", "page_size"), [(3, 1), (16, 16), (32, 16)])
def test_latent_pages(heads: int, page_size: int, rule: SplitRule | None) -> None:
    rows = [(1, 16), (1, 1), (1, 70), (15, 15), (2, 17), (5, 40)]
    batch = latent_batch(rows, heads=heads, rank=24, key_dim=16, rope_dim=8, value_dim=12, page_size=page_size)
    reference = batch.reference()
    found = batch.run(TritonAttention(CPU, rule))
    assert float((found - reference).norm() / reference.norm()) < 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    decode = [(1, rng.randint(1, 90)) for _ in range(rng.randint(0, 4))]
    rest = [(new, new + rng.choice([0, rng.randint(1, 60)])) for new in (rng.randint(1, 40) for _ in range(3))]
    batch = paged_batch(
        decode + rest,
        heads=rng.choice([(2, 1), (6, 2), (3, 3)]),
        head_dim=rng.choice([16, 24, 40, 64]),
        page_size=rng.choice([1, 2, 8, 16, 64]),
        dtype=rng.choice([torch.float32, torch.float16]),
        seed=seed,
    )
    limit = 1e-6 if batch.q_THD.dtype == torch.float32 else 1e-3
    assert error(batch, rng.choice([None, WHOLE, MANY])) < limit


@pytest.mark.parametrize("head_dim", [8, 96, 192, 256])
def test_head_dims_that_need_padding_or_small_tiles(head_dim: int) -> None:
    for dtype, limit in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
        batch = paged_batch([(1, 37), (19, 40)], heads=(2, 1), head_dim=head_dim, page_size=16, dtype=dtype)
        assert error(batch, MANY) < limit


def test_the_largest_tile() -> None:
    batch = paged_batch([(1, 20), (70, 150)], heads=(2, 1), head_dim=16, page_size=16, dtype=torch.float16)
    backend = TritonAttention(CPU)
    assert backend.tile(torch.float16, 16, 140, 10**6).queries == 128
    assert error(batch) < 1e-3


def test_a_group_larger_than_the_tile() -> None:
    assert error(paged_batch([(1, 20), (3, 20)], heads=(20, 1), head_dim=16, page_size=16)) < 1e-6


def test_scale_is_the_callers() -> None:
    batch = paged_batch([(1, 20), (3, 20)], heads=(2, 1), head_dim=16, page_size=16)
    assert error(batch, scale=0.7) < 1e-6


def test_strided_queries_as_they_come_out_of_a_stacked_projection() -> None:
    batch = paged_batch([(1, 20), (5, 20)], heads=(4, 2), head_dim=16, page_size=16)
    stacked = torch.cat([batch.q_THD.flatten(1), batch.k_TKD.flatten(1), batch.v_TKD.flatten(1)], dim=1)
    q, k, v = (part.view(6, -1, 16) for part in (stacked[:, :64], stacked[:, 64:96], stacked[:, 96:]))
    assert not q.is_contiguous()
    assert error(dataclasses.replace(batch, q_THD=q, k_TKD=k, v_TKD=v)) < 1e-6


def test_write_fills_the_places_of_new_tokens_and_no_other() -> None:
    batch = paged_batch([(1, 17), (1, 1), (20, 30)], heads=(3, 3), head_dim=24, page_size=4)
    expected = [cache.clone() for cache in batch.caches]
    index = batch.metadata.write_index_T
    TorchAttention().write(batch.k_TKD, batch.v_TKD, expected[0], expected[1], index)
    TritonAttention(CPU).write(batch.k_TKD, batch.v_TKD, batch.caches[0], batch.caches[1], index)
    for cache, want in zip(batch.caches, expected, strict=True):
        torch.testing.assert_close(cache, want, rtol=0, atol=0, equal_nan=True)
        assert cache.isnan().any(), "the cache was poisoned where nothing belongs"


def test_a_row_with_nan_keys_spoils_no_other_row() -> None:
    batch = paged_batch([(1, 40), (1, 50), (6, 30)], heads=(2, 1), head_dim=16, page_size=16)
    batch.k_TKD[1] = float("nan")
    for rule in (WHOLE, MANY):
        out = batch.run(TritonAttention(CPU, rule))
        assert out[1].isnan().all()
        assert not out[0].isnan().any()
        assert not out[2:].isnan().any()


@pytest.mark.parametrize("rule", [WHOLE, MANY], ids=["whole", "split"])
def test_a_padding_row_without_context_gives_zeros(rule: SplitRule) -> None:
    batch = paged_batch([(1, 20), (1, 20), (1, 20)], heads=(2, 1), head_dim=16, page_size=16)
    whole = batch.run(TritonAttention(CPU, rule))
    context_lens_R = batch.metadata.context_lens_R.clone()
    context_lens_R[1] = 0
    padded = dataclasses.replace(batch, metadata=dataclasses.replace(batch.metadata, context_lens_R=context_lens_R))
    out = padded.run(TritonAttention(CPU, rule))
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(out[[0, 2]], whole[[0, 2]])


def test_grids_follow_from_bounds_so_a_captured_launch_serves_shorter_contexts() -> None:
    batch = paged_batch([(1, 70), (1, 3), (1, 200)], heads=(2, 1), head_dim=16, page_size=16)
    loose = dataclasses.replace(batch.metadata, max_context_len=4096, context_lens=[4096] * 3)
    rule = SplitRule(programs=64, shortest=16, longest=64)
    assert rule.parts(3, 4096)[0] > rule.parts(3, 200)[0] > 1
    reference = batch.reference()
    out = dataclasses.replace(batch, metadata=loose).run(TritonAttention(CPU, rule))
    assert float((out - reference).norm() / reference.norm()) < 1e-6


def test_decode_rows_lead_the_batch() -> None:
    batch = paged_batch([(1, 20), (4, 20), (1, 20)], heads=(2, 1), head_dim=16, page_size=16)
    assert batch.metadata.num_decode_rows == 1
    with pytest.raises(AssertionError, match="decode rows must lead"):
        TritonAttention(CPU).plan(dataclasses.replace(batch.metadata, num_decode_rows=2))


def test_split_rule() -> None:
    rule = SplitRule(programs=64, shortest=128, longest=4096, most=40)
    assert rule.parts(1, 100)[0] == 1, "shorter than one part"
    assert rule.parts(8, 1024) == (8, 128), "as many as fill the device"
    assert rule.parts(8, 512) == (4, 128), "not below the shortest part"
    assert rule.parts(1000, 2000) == (1, 4096), "the device is full"
    assert rule.parts(1000, 10_000) == (3, 4096), "a long row does not run alone"
    assert rule.parts(1, 1_000_000) == (40, 128)
    assert dataclasses.replace(rule, most=1).parts(1, 1_000_000)[0] == 1


def test_the_name_triton_makes_this_backend() -> None:
    assert isinstance(make_attention_backend("triton", CPU), TritonAttention)


def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "pegainfer_core.testing.kernel_compile"],
        env=environment | {"TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    kernels = [json.loads(line) for line in run.stdout.splitlines()]
    attention = {"attend_kernel", "decode_kernel", "write_kernel"}
    latent = {"attend_latent_kernel"}
    experts = {"gate_up_kernel", "down_kernel"}
    products = {"rows_kernel", "tiles_kernel"}
    single = {
        "norm_kernel",
        "silu_mul_kernel",
        "sigmoid_mul_kernel",
        "heads_kernel",
        "arg_max_parts_kernel",
        "arg_max_kernel",
        "draw_parts_kernel",
        "draw_kernel",
    }
    delta = {"step_kernel", "convolve_kernel", "prepare_kernel", "scan_kernel", "gated_norm_kernel"}
    assert {kernel["kernel"] for kernel in kernels} == attention | latent | products | experts | single | delta
    assert {kernel["capability"] for kernel in kernels} == {80, 90}
    for kernel in kernels:
        assert kernel["shared"] <= 99 * 1024, f"{kernel}: more shared memory than a capability 8.9 device gives"
