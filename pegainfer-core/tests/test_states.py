"""Recurrent state on a device: a toy model with one layer of attention and one of state, through scheduler, runner and captured steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from pegainfer_core.engine import Engine
from pegainfer_core.family import KVGroup, ModelPlan, StateTensor, TensorSpec, WeightRule
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.kv.snapshots import SnapshotPool
from pegainfer_core.kv.storage import StateStorage, allocate
from pegainfer_core.messages import AddRequest
from pegainfer_core.model import ForwardBatch, Model
from pegainfer_core.ops.attention import AttentionBackend, AttentionMetadata
from pegainfer_core.runner import Runner
from pegainfer_core.sampler import Sampler
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from torch import Tensor

CPU = torch.device("cpu")
VOCAB_SIZE, WIDTH, PAGE_SIZE, MAX_LEN = 64, 16, 4, 120
PLAN = ModelPlan(
    family="toy",
    config=None,
    dtype="float32",
    vocab_size=VOCAB_SIZE,
    hidden_size=WIDTH,
    num_layers=2,
    max_context=MAX_LEN,
    eos_token_ids=frozenset(),
    kv_groups=(
        KVGroup(kind="full", layers=(1,), num_kv_heads=1, head_dim=WIDTH),
        KVGroup(
            kind="state",
            layers=(0,),
            state=(
                StateTensor(name="last", shape=(2, WIDTH)),
                StateTensor(name="sum", shape=(WIDTH,), dtype="float32"),
            ),
        ),
    ),
    weight_rules=(WeightRule(parameter="embedding", sources=(TensorSpec(name="e", shape=(VOCAB_SIZE, WIDTH)),)),),
)


class ToyModel(Model):
    """Each token sees a fading sum of all tokens before it, and the two just before it, by state; all of them by attention."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding_VE = torch.randn(VOCAB_SIZE, WIDTH, generator=generator)
        self.mix_EE = torch.randn(WIDTH, WIDTH, generator=generator) / 4

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See Model."""
        x_TE = self.embedding_VE[batch.token_ids_T]
        x_TE = torch.tanh((x_TE + self._recall(x_TE, batch)) @ self.mix_EE)
        heads = x_TE[:, None]
        return x_TE + batch.attention.run(1, heads, heads, heads)[:, 0]

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """See Model."""
        return hidden_RE @ self.embedding_VE.T

    def _recall(self, x_TE: Tensor, batch: ForwardBatch) -> Tensor:
        states = batch.states
        last_S2E, sum_SE = states.layers[0]
        out_TE = torch.zeros_like(x_TE)
        ends = states.query_start_R1.tolist()
        for row, (first, end) in enumerate(itertools.pairwise(ends)):
            slot, fresh = int(states.slots_R[row]), bool(states.fresh_R[row])
            last = [torch.zeros(WIDTH)] * 2 if fresh else list(last_S2E[slot].clone())
            total = torch.zeros(WIDTH) if fresh else sum_SE[slot].clone()
            for token in range(first, end):
                out_TE[token] = total + last[0] - last[1]
                total = 0.95 * total + x_TE[token]
                last = [last[1], x_TE[token]]
            if end > first:
                last_S2E[slot] = torch.stack(last)
                sum_SE[slot] = total
        return out_TE


class PlainAttention(AttentionBackend):
    """Reads the lengths from the device's tensors, as a captured step has to."""

    name = "plain"

    def plan(self, metadata: AttentionMetadata) -> None:
        """See AttentionBackend."""

    def run(
        self, q_THD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """See AttentionBackend."""
        out_THD = torch.zeros_like(q_THD)
        ends, lengths = metadata.query_start_R1.tolist(), metadata.context_lens_R.tolist()
        for row, (first, end) in enumerate(itertools.pairwise(ends)):
            pages = metadata.page_table_RP[row]
            k_CD = k_cache_PSKD[pages].flatten(0, 1)[:, 0]
            v_CD = v_cache_PSKD[pages].flatten(0, 1)[:, 0]
            for token in range(first, end):
                seen = lengths[row] - (end - 1 - token)
                weights_C = torch.softmax(k_CD[:seen] @ q_THD[token, 0] * scale, 0)
                out_THD[token, 0] = weights_C @ v_CD[:seen]
        return out_THD


class Recorder:
    """Stands in for CUDA graphs: a replay does the work again."""

    def __init__(self) -> None:
        self.replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """See graphs.Recorder."""

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def make_engine(
    *,
    num_pages: int = 100,
    slots: int = 5,
    num_snapshots: int = 0,
    max_prefill_tokens: int = 20,
    run_ahead: bool = False,
    recorder: Recorder | None = None,
) -> Engine:
    """An engine whose memory is NaN wherever nothing was written."""
    caches = allocate(PLAN, num_pages, PAGE_SIZE, CPU, torch.float32)
    states = StateStorage(PLAN, slots, num_snapshots, CPU, torch.float32)
    for tensor in itertools.chain(*caches, states._pools):
        tensor.fill_(float("nan"))
    runner = Runner(
        ToyModel().eval(),
        caches,
        states,
        PlainAttention(),
        Sampler(VOCAB_SIZE, frozenset(), CPU),
        num_slots=slots,
        max_model_len=MAX_LEN,
        max_prefill_tokens=max_prefill_tokens,
        page_size=PAGE_SIZE,
        device=CPU,
        recorder=recorder,
    )
    limits = SchedulerLimits(
        max_model_len=MAX_LEN,
        max_prefill_tokens=max_prefill_tokens,
        max_running_requests=slots,
        max_waiting_requests=100,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset(),
    )
    cache = KVCache(num_pages, PAGE_SIZE, bool(num_snapshots), SnapshotPool(num_snapshots), PAGE_SIZE)
    return Engine(Scheduler(limits, cache), runner, run_ahead=run_ahead)


def prompts() -> dict[str, list[int]]:
    """Prompts of one family, that part around page ends."""
    chance = random.Random(3)
    shared = chance.choices(range(VOCAB_SIZE), k=60)
    lengths = [1, 2, 3, 4, 5, 15, 16, 17, 21, 33, 16, 17, 33, 47, 48, 49, 53, 60]
    return {
        f"{index}": shared[:length] + chance.choices(range(VOCAB_SIZE), k=index % 3)
        for index, length in enumerate(lengths)
    }


def run(engine: Engine, requests: dict[str, list[int]], together: bool) -> dict[str, list[int]]:
    """Greedy tokens of each request; with `together`, one more joins in each step."""
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    waiting = list(requests.items())
    while waiting or engine.has_work:
        if waiting and (together or not engine.has_work):
            name, prompt = waiting.pop(0)
            engine.add(AddRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=20)))
        for output in engine.step().outputs:
            assert output.error is None, output.error
            tokens[output.request_id] += output.token_ids
    return tokens


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Each request alone, in an engine of its own."""
    return {name: run(make_engine(), {name: prompt}, False)[name] for name, prompt in prompts().items()}


@pytest.mark.parametrize(
    ("captured", "run_ahead", "num_snapshots"),
    [(False, False, 0), (False, True, 2), (True, False, 30), (True, True, 2), (True, True, 30)],
)
def test_tokens_are_those_of_running_alone(
    expected: dict[str, list[int]], captured: bool, run_ahead: bool, num_snapshots: int
) -> None:
    """Slots used again and again, chunks, mixed and padded steps, hits, and preemption."""
    assert len({tuple(tokens) for tokens in expected.values()}) > len(expected) // 2, "states matter"
    for num_pages, max_prefill_tokens in ((100, 20), (26, 7)):
        recorder = Recorder() if captured else None
        engine = make_engine(
            num_pages=num_pages,
            num_snapshots=num_snapshots,
            max_prefill_tokens=max_prefill_tokens,
            run_ahead=run_ahead,
            recorder=recorder,
        )
        assert run(engine, prompts(), together=True) == expected
        assert run(engine, prompts(), together=False) == expected
        stats = engine.scheduler.stats()
        if num_pages == 26:
            assert stats.preemptions > 0
        if num_snapshots == 30:
            assert stats.snapshots is not None and stats.snapshots.num_hits > 10
        assert recorder is None or recorder.replayed > 50


def test_a_snapshot_is_a_copy_of_one_slot_alone() -> None:
    states = StateStorage(PLAN, 3, 2, CPU, torch.float32)
    assert [tensor.shape for tensor in states.layers[0]] == [(4, 2, WIDTH), (4, WIDTH)]
    assert states.layers[1] == ()
    for slot in range(4):
        for tensor in states.layers[0]:
            tensor[slot] = slot
    states.save(1, 0)
    states.save(2, 1)
    for tensor in states.layers[0]:
        tensor[1] = 9
    states.restore(0, 0)
    states.restore(1, 1)
    for tensor in states.layers[0]:
        assert [float(row.mean()) for row in tensor] == [1, 2, 2, 3]
