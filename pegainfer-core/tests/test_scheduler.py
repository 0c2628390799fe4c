"""Random lives of requests against the scheduler, with a runner whose tokens depend on every page being right."""

from __future__ import annotations

import dataclasses
from array import array
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegainfer_core.engine import Engine
from pegainfer_core.errors import RequestError
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.kv.pages import PagePool, page_hashes, root_hash
from pegainfer_core.kv.snapshots import SnapshotPool
from pegainfer_core.messages import AddRequest, RequestOutput
from pegainfer_core.plan import StepPlan
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from pegainfer_core.testing.fake_runner import VOCAB_SIZE, FakeRunner, expected_output

EOS = frozenset({7, 8})


def page_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """Of one page that holds just these."""
    (digest,) = page_hashes(parent, array("I", token_ids), len(token_ids))
    return digest


def make_engine(
    *,
    num_pages: int = 40,
    page_size: int = 4,
    max_prefill_tokens: int = 16,
    max_running: int = 4,
    max_waiting: int = 1000,
    max_model_len: int = 100,
    prefix_cache: bool = True,
    run_ahead: bool = False,
    runner: FakeRunner | None = None,
    num_snapshots: int | None = None,
    snapshot_stride: int | None = None,
) -> Engine:
    """`num_snapshots` is for models with recurrent state."""
    limits = SchedulerLimits(
        max_model_len=min(max_model_len, (num_pages - 1) * page_size),
        max_prefill_tokens=max_prefill_tokens,
        max_running_requests=max_running,
        max_waiting_requests=max_waiting,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS,
    )
    recurrent = num_snapshots is not None
    snapshots = None if num_snapshots is None else SnapshotPool(num_snapshots, 100)
    cache = KVCache(num_pages, page_size, prefix_cache, snapshots, snapshot_stride or page_size)
    runner = runner or FakeRunner(num_pages, page_size, recurrent=recurrent)
    return Engine(Scheduler(limits, cache), runner, run_ahead=run_ahead)


class Collector:
    """Gathers outputs per request and insists on one end each."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, RequestOutput] = {}

    def take(self, outputs: list[RequestOutput]) -> None:
        assert len({output.request_id for output in outputs}) == len(outputs), "one output per request and step"
        for output in outputs:
            assert output.request_id not in self.ends, "nothing after the end"
            self.tokens[output.request_id].extend(output.token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output


def drain(engine: Engine, collector: Collector, limit: int = 5000) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(limit):
        if not engine.has_work:
            return outputs
        step = engine.step().outputs
        collector.take(step)
        outputs.extend(step)
    raise AssertionError("requests never end")


def run(engine: Engine, *messages: AddRequest) -> Collector:
    collector = Collector()
    for message in messages:
        engine.add(message)
    drain(engine, collector)
    return collector


def add(request_id: str, prompt: list[int], max_tokens: int | None = 5, **params: object) -> AddRequest:
    seed = params.pop("seed", 3)
    return AddRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=seed, **params))  # type: ignore[arg-type]


@dataclasses.dataclass
class Life:
    prompt: list[int]
    max_tokens: int
    seed: int
    salt: str | None
    priority: int
    prompt_logprobs: bool
    penalty: float


# Few distinct tokens and shared beginnings, so that prefixes meet and part at every offset of a page.
prompts = st.tuples(st.integers(0, 3), st.integers(0, 30), st.lists(st.integers(100, 102), max_size=6)).map(
    lambda t: ([100 + t[0]] * t[1] + t[2]) or [100]
)
lives = st.builds(
    Life,
    prompt=prompts,
    max_tokens=st.integers(1, 30),
    seed=st.integers(0, 2),
    salt=st.sampled_from([None, None, "x"]),
    priority=st.integers(0, 1),
    prompt_logprobs=st.sampled_from([False, False, True]),
    penalty=st.sampled_from([0.0, 0.0, 1.0]),
)
actions = st.lists(
    st.one_of(
        lives,
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("steps"), st.integers(1, 8)),
    ),
    max_size=40,
)


@given(
    actions=actions,
    num_pages=st.integers(17, 60),
    page_size=st.sampled_from([1, 2, 4, 8]),
    max_prefill_tokens=st.sampled_from([1, 3, 8, 64]),
    max_running=st.integers(1, 6),
    prefix_cache=st.booleans(),
    run_ahead=st.booleans(),
    num_snapshots=st.sampled_from([None, 0, 1, 2, 5, 40]),
    snapshot_pages=st.sampled_from([1, 1, 2, 4]),
)
@settings(max_examples=500, deadline=None)
def test_any_life_gives_the_tokens_of_running_alone(
    actions: list[object],
    num_pages: int,
    page_size: int,
    max_prefill_tokens: int,
    max_running: int,
    prefix_cache: bool,
    run_ahead: bool,
    num_snapshots: int | None,
    snapshot_pages: int,
) -> None:
    engine = make_engine(
        num_pages=num_pages,
        page_size=page_size,
        max_prefill_tokens=max_prefill_tokens,
        max_running=max_running,
        prefix_cache=prefix_cache,
        run_ahead=run_ahead,
        num_snapshots=num_snapshots,
        snapshot_stride=snapshot_pages * page_size,
    )
    pool = engine.scheduler.cache.pool
    collector = Collector()
    submitted: dict[str, Life] = {}
    aborted: set[str] = set()
    for action in actions:
        if isinstance(action, Life):
            request_id = str(len(submitted))
            submitted[request_id] = action
            params = SamplingParams(
                max_tokens=action.max_tokens,
                seed=action.seed,
                prompt_logprobs=0 if action.prompt_logprobs else None,
                presence_penalty=action.penalty,
            )
            engine.add(AddRequest(request_id, action.prompt, params, action.salt, action.priority))
        elif isinstance(action, tuple) and action[0] == "abort":
            aborted.add(str(action[1]))
            engine.abort([str(action[1])])
        elif isinstance(action, tuple):
            for _ in range(action[1]):
                collector.take(engine.step().outputs)
                check_ownership(engine)
    drain(engine, collector)

    assert set(collector.ends) == set(submitted), "every request ends"
    assert pool.num_free == pool.num_usable, "all pages are back"
    assert engine.scheduler.slots.num_free == max_running
    check_snapshots(engine)
    for request_id, life in submitted.items():
        end = collector.ends[request_id]
        expected = expected_output(life.prompt, life.seed, life.max_tokens, EOS)
        got = collector.tokens[request_id]
        if end.finish_reason in ("stop", "length"):
            assert got == expected
            assert (end.finish_reason == "length") == (len(expected) == life.max_tokens)
            assert end.num_output_tokens == len(expected) + (end.finish_reason == "stop")
        elif end.finish_reason == "abort":
            assert request_id in aborted and got == expected[: len(got)]
        else:
            limit = engine.scheduler.limits.max_model_len
            assert end.finish_reason == "rejected" and len(life.prompt) + life.max_tokens > limit


def check_snapshots(engine: Engine) -> None:
    """Nothing is reserved any more, and no slot is lost or in two places."""
    snapshots = engine.scheduler.cache.snapshots
    if snapshots is not None:
        pool = snapshots.pool
        assert not pool._reserved
        assert sorted([*pool._blank, *pool._slot_of.values()]) == list(range(pool.num_slots))


def check_ownership(engine: Engine) -> None:
    """No page is in two requests' tables unless it is registered and holds the same tokens in both."""
    holders: dict[int, tuple[str | None, list[int]]] = {}
    scheduler = engine.scheduler
    size = scheduler.cache.page_size
    for request in scheduler.running:
        assert len(set(request.pages)) == len(request.pages)
        for index, page in enumerate(request.pages):
            content = (request.cache_salt, request.token_ids[: (index + 1) * size].tolist())
            if page in holders:
                assert holders[page] == content and len(content[1]) == (index + 1) * size
            holders[page] = content
    held = len(holders)
    assert held + scheduler.cache.pool.num_free == scheduler.cache.pool.num_usable


@given(
    first=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
    second=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
)
def test_hashes_see_every_bit_of_every_id(first: list[int], second: list[int]) -> None:
    root = root_hash(None)
    assert (page_hash(root, first) == page_hash(root, second)) == (first == second)
    truncated = [token_id & 0xFF for token_id in first]
    assert (page_hash(root, first) == page_hash(root, truncated)) == (first == truncated)


def test_hashes_depend_on_parent_and_salt() -> None:
    roots = {root_hash(salt) for salt in (None, "", "-", "+", "x")}
    assert len(roots) == 5
    assert len({page_hash(root, [1, 23]) for root in roots} | {page_hash(root_hash(None), [12, 3])}) == 6


def test_eviction_takes_the_least_recently_used_tail_first() -> None:
    pool = PagePool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    assert old is not None and new is not None
    for pages, salt in ((old, "old"), (new, "new")):
        for index, page in enumerate(pages):
            pool.register(page, page_hash(root_hash(salt), [index]))
        pool.release(pages)
    assert pool.allocate(3) == [old[1], old[0], new[1]]
    new_0, old_0 = (page_hash(root_hash(salt), [0]) for salt in ("new", "old"))
    assert pool.find([new_0, old_0, new_0]) == new[:1]
    assert pool.allocate(2) is None and pool.num_free == 1


def test_a_second_run_hits_all_full_pages_but_recomputes_the_last_token() -> None:
    for length, cached in ((3, 0), (4, 0), (5, 4), (8, 4), (9, 8)):
        engine = make_engine()
        prompt = list(range(100, 100 + length))
        cold = run(engine, add("cold", prompt))
        engine.add(add("warm", prompt))
        outputs = engine.step().outputs
        assert [output.num_cached_tokens for output in outputs] == [cached]
        warm = Collector()
        warm.take(outputs)
        drain(engine, warm)
        assert warm.tokens["warm"] == cold.tokens["cold"]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_the_next_turn_of_a_chat_hits_the_output_of_the_last_one(run_ahead: bool) -> None:
    engine = make_engine(max_prefill_tokens=3, run_ahead=run_ahead)
    prompt = list(range(100, 110))
    answer = run(engine, add("first", prompt, 9, ignore_eos=True)).tokens["first"]
    engine.add(add("second", prompt + answer + [200], 1))
    outputs = drain(engine, Collector())
    # 18 tokens were computed (the last sampled one never is): 4 full pages of 4.
    assert [output.num_cached_tokens for output in outputs] == [16]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_no_token_is_computed_that_nobody_asked_for(run_ahead: bool) -> None:
    plans: list[StepPlan] = []
    engine = make_engine(run_ahead=run_ahead, runner=FakeRunner(40, 4, plans.append))
    run(engine, add("a", [100] * 5, 7, ignore_eos=True))
    assert sum(plan.num_tokens for plan in plans) == 5 + 7 - 1


def test_prompt_logprobs_are_complete_and_never_come_from_the_cache() -> None:
    engine = make_engine(max_prefill_tokens=3)
    prompt = list(range(100, 120))
    run(engine, add("cold", prompt))
    engine.add(add("echo", prompt, max_tokens=0, prompt_logprobs=1))
    outputs = drain(engine, Collector())
    (output,) = outputs
    assert output.finish_reason == "length" and output.token_ids == [] and output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.prompt_logprobs[1:] if entry] == prompt[1:]


def test_single_token_rows_lead_every_plan_and_never_wait_for_a_long_prompt() -> None:
    plans: list[StepPlan] = []
    engine = make_engine(max_prefill_tokens=2, runner=FakeRunner(40, 4, plans.append))
    engine.add(add("stream", [100, 101], max_tokens=30, ignore_eos=True))
    engine.step()
    engine.add(add("long", [100] * 60, max_tokens=1))
    for _ in range(29):
        (output,) = [o for o in engine.step().outputs if o.request_id == "stream"]
        assert len(output.token_ids) == 1
    for plan in plans:
        lengths = [row.num_tokens for row in plan.rows]
        assert lengths == sorted(lengths)
    assert sum(len(plan.rows) == 2 for plan in plans) == 29


def test_refusals_name_the_limit_and_block_nobody() -> None:
    engine = make_engine(num_pages=11, max_model_len=40, max_running=1, max_waiting=1)
    cases = {
        "empty": (add("empty", []), "invalid_request", "empty"),
        "high id": (add("high id", [VOCAB_SIZE]), "invalid_request", str(VOCAB_SIZE)),
        "low id": (add("low id", [-1]), "invalid_request", "-1"),
        "bias": (add("bias", [1], logit_bias={10**6: 1.0}), "invalid_request", "logit_bias"),
        "stop": (add("stop", [1], stop_token_ids=(10**6,)), "invalid_request", "stop_token_ids"),
        "prompt": (add("prompt", [100] * 40, None), "context_length_exceeded", "40 tokens"),
        "total": (add("total", [100] * 39, 2), "context_length_exceeded", "40 tokens"),
    }
    for name, (message, code, words) in cases.items():
        end = run(engine, message).ends[name]
        assert (end.finish_reason, end.rejection) == ("rejected", code), name
        assert words in (end.error or "")
    fits = run(engine, add("fits", [100] * 39, None, ignore_eos=True))
    assert (fits.ends["fits"].finish_reason, len(fits.tokens["fits"])) == ("length", 1)
    full = run(engine, add("runs", [100]), add("waits", [100]), add("too many", [100]))
    assert full.ends["too many"].rejection == "queue_full"
    assert full.ends["waits"].finish_reason in ("stop", "length")


def test_what_exceeds_the_pool_is_refused_with_the_flag_to_turn() -> None:
    limits = SchedulerLimits(
        max_model_len=100,
        max_prefill_tokens=16,
        max_running_requests=2,
        max_waiting_requests=10,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS,
    )
    engine = Engine(Scheduler(limits, KVCache(3, 4)), FakeRunner(3, 4))
    end = run(engine, add("big", [100] * 7, 3)).ends["big"]
    assert end.rejection == "kv_budget_exceeded" and "--kv-cache-memory" in (end.error or "")
    assert run(engine, add("fits", [100] * 7, 2)).ends["fits"].finish_reason == "length"


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_failing_step_fails_its_own_requests_only(run_ahead: bool) -> None:
    failures = iter([False, False, True])

    def fail_when(plan: StepPlan) -> None:
        if next(failures, False):
            raise RuntimeError("boom")

    engine = make_engine(run_ahead=run_ahead, runner=FakeRunner(40, 4, fail_when))
    collector = run(engine, add("hit", [100, 101], 20, ignore_eos=True))
    assert collector.ends["hit"].finish_reason == "error" and "boom" in (collector.ends["hit"].error or "")
    after = run(engine, add("after", [100, 101], 20, ignore_eos=True))
    assert after.tokens["after"] == expected_output([100, 101], 3, 20, frozenset())
    assert engine.scheduler.cache.pool.num_free == engine.scheduler.cache.pool.num_usable


def test_stop_ids_and_eos_are_told_apart() -> None:
    free = expected_output([100], 3, 20, frozenset())
    stop_at = free[4]
    stopped = run(make_engine(), add("s", [100], 20, stop_token_ids=(stop_at,), ignore_eos=True)).ends["s"]
    assert (stopped.finish_reason, stopped.stop_token_id, stopped.num_output_tokens) == ("stop", stop_at, 5)
    seed = next(s for s in range(10_000) if len(expected_output([100], s, 20, EOS)) < 20)
    ended = run(make_engine(), add("e", [100], 20, seed=seed)).ends["e"]
    assert (ended.finish_reason, ended.stop_token_id) == ("stop", None)
    ignored = run(make_engine(), add("i", [100], 20, seed=seed, ignore_eos=True))
    assert ignored.ends["i"].finish_reason == "length" and len(ignored.tokens["i"]) == 20


def test_observers_see_steps_and_a_broken_one_is_dropped_once() -> None:
    seen: list[int] = []

    def broken(report: object) -> None:
        seen.append(-1)
        raise ValueError("observer bug")

    engine = make_engine()
    engine._observers = [broken, lambda report: seen.append(report.num_tokens)]
    run(engine, add("a", [100] * 5, 3, ignore_eos=True))
    assert seen == [-1, 5, 1, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", float("inf")),
        ("top_k", -2),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", dict.fromkeys(range(301), 0.0)),
        ("logprobs", 21),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("seed", 2**63),
    ],
)
def test_sampling_params_name_the_field_that_is_out_of_range(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
