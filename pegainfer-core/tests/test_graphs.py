"""Steps padded to shapes and replayed give what exact eager steps give. Recording is simulated: a replay does the work again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pegainfer_core.batch import BatchBuilder, StepInputs, StepShape, exact_shape
from pegainfer_core.config import EngineConfig
from pegainfer_core.engine import Engine
from pegainfer_core.grammar_admission import GrammarAdmission
from pegainfer_core.grammars import Grammars
from pegainfer_core.graphs import StepGraphs
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.kv.storage import StateStorage, allocate
from pegainfer_core.messages import AddRequest, RequestOutput
from pegainfer_core.model import BuildContext
from pegainfer_core.ops.attention import AttentionBackend, make_attention_backend
from pegainfer_core.ops.attention_triton import TritonAttention
from pegainfer_core.plan import Row, StepPlan
from pegainfer_core.plugins import load_plugins
from pegainfer_core.resolve import resolve_model
from pegainfer_core.runner import Runner
from pegainfer_core.sampler import Sampler
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from pegainfer_core.structured import regex
from pegainfer_core.weights import load_weights
from pegainfer_qwen3.testing import write_tiny_qwen3

CPU = torch.device("cpu")
NUM_PAGES, PAGE_SIZE, MAX_LEN, SLOTS, MAX_PREFILL = 40, 4, 100, 5, 20


class Recorder:
    """Stands in for CUDA graphs: remembers the work, counts replays."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def make_engine(path: Path, backend: AttentionBackend, recorder: Recorder | None, *, run_ahead: bool = False) -> Engine:
    resolved = resolve_model(EngineConfig(model=str(path)), load_plugins())
    with torch.device("meta"):
        context = BuildContext(device=CPU, dtype=torch.float32, max_model_len=MAX_LEN)
        model = resolved.family.build(resolved.plan, context)
    load_weights(model, resolved.plan, path, CPU, torch.float32)
    caches = allocate(resolved.plan, NUM_PAGES, PAGE_SIZE, CPU, torch.float32)
    for keys, values in caches:  # a replay's padding reads page 0 only; anything else read by mistake shows
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    grammars = Grammars(resolved.load_tokenizer, resolved.vocab_size, resolved.eos_token_ids)
    runner = Runner(
        model.eval(),
        caches,
        StateStorage(resolved.plan, SLOTS, 0, CPU, torch.float32),
        backend,
        Sampler(resolved.vocab_size, resolved.eos_token_ids, CPU, grammars),
        num_slots=SLOTS,
        max_model_len=MAX_LEN,
        max_prefill_tokens=MAX_PREFILL,
        page_size=PAGE_SIZE,
        device=CPU,
        recorder=recorder,
    )
    limits = SchedulerLimits(
        max_model_len=MAX_LEN,
        max_prefill_tokens=MAX_PREFILL,
        max_running_requests=SLOTS,
        max_waiting_requests=100,
        vocab_size=resolved.vocab_size,
        eos_token_ids=frozenset(),
    )
    scheduler = Scheduler(limits, KVCache(NUM_PAGES, PAGE_SIZE))
    return Engine(scheduler, runner, run_ahead=run_ahead, grammars=GrammarAdmission(grammars))


def run(engine: Engine, requests: list[AddRequest]) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    waiting = list(requests)
    while waiting or engine.has_work:
        if waiting:  # one joins per step, so that prompts and decode rows meet
            engine.add(waiting.pop(0))
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def requests() -> list[AddRequest]:
    greedy = SamplingParams(temperature=0.0, max_tokens=9, logprobs=2)
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=7, logprobs=0)
    penalised = SamplingParams(temperature=0.0, presence_penalty=1.5, max_tokens=8)
    digits = SamplingParams(temperature=0.0, grammar=regex("[0-9]{12}"), logprobs=0)
    echo = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1)
    shared = list(range(20, 41))
    return [
        AddRequest("short", [7], greedy),
        AddRequest("long", list(range(100, 145)), greedy),
        AddRequest("seeded", [9, 8, 7, 6, 5], seeded),
        AddRequest("penalised", shared, penalised),
        AddRequest("digits", [12, 13], digits),
        AddRequest("warm", shared, greedy),
        AddRequest("echo", [30, 31, 32, 33, 34, 35], echo),
        AddRequest("one", [11], SamplingParams(temperature=0.0, max_tokens=1)),
    ]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_replayed_steps_equal_eager_ones(tmp_path: Path, run_ahead: bool) -> None:
    path = write_tiny_qwen3(tmp_path, num_hidden_layers=1)
    eager = run(make_engine(path, make_attention_backend("torch", CPU), None), requests())
    recorder = Recorder()
    engine = make_engine(path, TritonAttention(CPU), recorder, run_ahead=run_ahead)
    replayed = run(engine, requests())
    assert recorder.replayed > 10 > recorder.recorded
    for request_id, expected in eager.items():
        got = replayed[request_id]
        assert tokens(got) == tokens(expected), request_id
        assert got[-1].finish_reason == expected[-1].finish_reason
        for one, other in zip(got, expected, strict=True):
            for a, b in zip(one.logprobs or [], other.logprobs or [], strict=True):
                assert abs(a.logprob - b.logprob) < 1e-4
                assert a.rank == b.rank
                assert [token_id for token_id, _ in a.top] == [token_id for token_id, _ in b.top]


def test_shapes_hold_their_plans_and_are_captured_once(tmp_path: Path) -> None:
    builder = BatchBuilder(200, 20_000, 16, CPU)
    recorder = Recorder()

    def forward(shape: StepShape, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.zeros(shape.sampled_rows, dtype=torch.int64)
        return torch.zeros(shape.sampled_rows, 7), ids, ids + 1

    graphs = StepGraphs(forward, builder, recorder, max_rows=200, max_prompt_tokens=2000, max_context_len=20_000)
    for decode_rows in (0, 1, 3, 5, 8, 9, 16, 17, 33, 200):
        for prompts in ([], [2], [31, 2], [2000], [60] * 32):
            if decode_rows + len(prompts) == 0:
                continue
            plan = plan_of(decode_rows, prompts)
            shape = graphs.shape(plan)
            assert shape is not None
            exact = exact_shape(plan)
            assert shape.decode_rows >= exact.decode_rows and shape.prompt_rows >= exact.prompt_rows
            assert shape.prompt_tokens >= exact.prompt_tokens and shape.max_context_len >= exact.max_context_len
            assert shape.sampled_rows == shape.num_rows
            assert graphs.step(shape) is graphs.step(shape)
    assert graphs.shape(plan_of(1, [2] * 33)) is None, "more prompts than a shape has"
    assert graphs.shape(plan_of(0, [4], prompt_logprobs=True)) is None
    far = graphs.shape(plan_of(1, [], start=15_000))
    assert far is not None and far.max_context_len == 20_000
    before = recorder.recorded
    while graphs.capture_next():
        pass
    assert recorder.recorded == graphs.num_captured > before


def plan_of(decode_rows: int, prompts: list[int], *, start: int = 5, prompt_logprobs: bool = False) -> StepPlan:
    lengths = [1] * decode_rows + prompts
    rows = [
        Row(
            slot=slot,
            start=start,
            num_tokens=length,
            token_ids=[1] * length,
            new_pages=[],
            samples=True,
            output_index=0,
            prompt_logprobs=prompt_logprobs,
        )
        for slot, length in enumerate(lengths)
    ]
    return StepPlan(index=0, joins=[], rows=rows)
