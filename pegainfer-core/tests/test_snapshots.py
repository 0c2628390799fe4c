"""Recurrent state through the scheduler: slots, snapshots and where they are taken. The fake runner's tokens depend on every state."""

from __future__ import annotations

import random

import pytest
from pegainfer_core.engine import Engine
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.kv.snapshots import GENERATION_PROMPT_TOKENS, SnapshotPool
from pegainfer_core.messages import AddRequest, RequestOutput, SnapshotStats
from pegainfer_core.plan import Row, RowResult, StepPlan
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from pegainfer_core.testing.fake_runner import VOCAB_SIZE, FakeRunner, FakeStep, expected_output

NONE: frozenset[int] = frozenset()


class Driver:
    """An engine of a recurrent model, and what comes out of it."""

    def __init__(
        self,
        *,
        num_pages: int = 200,
        page_size: int = 4,
        max_running: int = 8,
        max_prefill_tokens: int = 64,
        num_snapshots: int = 40,
        stride: int = 4,
        run_ahead: bool = False,
        runner: FakeRunner | None = None,
    ) -> None:
        limits = SchedulerLimits(
            max_model_len=400,
            max_prefill_tokens=max_prefill_tokens,
            max_running_requests=max_running,
            max_waiting_requests=1000,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=NONE,
        )
        self.cache = KVCache(num_pages, page_size, True, SnapshotPool(num_snapshots, 100), stride)
        self.runner = runner or FakeRunner(num_pages, page_size, recurrent=True)
        self.plans: list[StepPlan] = []
        self.runner._fail_when = self.plans.append
        self.engine = Engine(Scheduler(limits, self.cache), self.runner, run_ahead=run_ahead)
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.ends: list[RequestOutput] = []

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 5) -> None:
        self.tokens[request_id] = []
        self.engine.add(AddRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=3)))

    def step(self) -> None:
        for output in self.engine.step().outputs:
            self.tokens[output.request_id] += output.token_ids
            if output.num_cached_tokens is not None:
                self.cached[output.request_id] = output.num_cached_tokens
            if output.finish_reason is not None:
                self.ends.append(output)

    def drain(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("requests never end")

    def run(self, request_id: str, prompt: list[int], max_tokens: int = 5) -> list[int]:
        """One request alone, whose tokens must be right. Returns them."""
        self.add(request_id, prompt, max_tokens)
        self.drain()
        assert self.tokens[request_id] == expected_output(prompt, 3, max_tokens, NONE), request_id
        return self.tokens[request_id]

    @property
    def stats(self) -> SnapshotStats:
        stats = self.engine.scheduler.stats().snapshots
        assert stats is not None
        return stats


def ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(100, 500), k=count)


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("max_prefill_tokens", [3, 7, 64])
def test_thousands_of_random_steps_give_the_tokens_of_running_alone(run_ahead: bool, max_prefill_tokens: int) -> None:
    """Families of prompts that part around page ends, too few pages, too few snapshots, aborts, and next turns."""
    chance = random.Random(7 * max_prefill_tokens + run_ahead)
    driver = Driver(
        num_pages=40, max_running=5, num_snapshots=6, max_prefill_tokens=max_prefill_tokens, run_ahead=run_ahead
    )
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for step in range(3000):
        if chance.random() < 0.2 and len(driver.engine.scheduler.waiting) < 8:
            boundary = 4 * chance.randint(0, 12)
            prompt = ids(60, seed=chance.randint(0, 2))[: max(1, boundary + chance.choice([-1, 0, 1, 5]))]
            finished = [name for name in prompts if name not in aborted and driver.tokens[name]]
            if finished and chance.random() < 0.4:
                name = chance.choice(finished[-6:])
                prompt = (prompts[name][0] + driver.tokens[name])[
                    : 4 * chance.randint(1, 20) + chance.choice([-1, 0, 1, 5])
                ]
            name = f"{step}"
            prompts[name] = (prompt, chance.randint(1, 25))
            driver.add(name, *prompts[name])
        if chance.random() < 0.03 and driver.engine.scheduler.running:
            aborted.add(chance.choice(driver.engine.scheduler.running).request_id)
            driver.engine.abort(sorted(aborted))
        driver.step()
    driver.drain()
    for name, (prompt, max_tokens) in prompts.items():
        expected = expected_output(prompt, 3, max_tokens, NONE)
        assert driver.tokens[name] == expected[: len(driver.tokens[name])], name
        assert name in aborted or len(driver.tokens[name]) == max_tokens
    stats = driver.engine.scheduler.stats()
    assert stats.num_free_pages == stats.num_pages
    assert stats.preemptions > 0
    assert driver.stats.num_hits > 20
    assert driver.stats.num_evicted > 20


class ForgetfulRunner(FakeRunner):
    """Does one thing wrong with states."""

    def __init__(self, mistake: str) -> None:
        super().__init__(200, 4, recurrent=True)
        self.mistake = mistake

    def launch(self, plan: StepPlan) -> FakeStep:
        """See FakeRunner."""
        before = dict(self._snapshots)
        if self.mistake == "no restore":
            self._snapshots = dict.fromkeys(self._snapshots, b"nothing")
        done = super().launch(plan)
        if self.mistake == "saved late":  # after the next step wrote to the slot
            self._snapshots = before | {row.snapshot: b"late" for row in plan.rows if row.snapshot is not None}
        if self.mistake == "wrong slot":
            states = list(self._states.values())
            self._states = dict(zip(self._states, states[1:] + states[:1], strict=True))
        return done


@pytest.mark.parametrize("mistake", ["no restore", "saved late", "wrong slot"])
def test_a_runner_that_mixes_up_states_gives_wrong_tokens(mistake: str) -> None:
    driver = Driver(runner=ForgetfulRunner(mistake))
    prompt = ids(40)
    for name in ("first", "second", "third"):
        driver.add(name, [*prompt, 5] if name == "second" else prompt, 6)
        if name != "second":
            driver.drain()
    expected = expected_output(prompt, 3, 6, NONE)
    assert any(driver.tokens[name] != expected for name in ("first", "third"))


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("max_prefill_tokens", [5, 64])
def test_hits_around_a_page_end_equal_cold_runs(run_ahead: bool, max_prefill_tokens: int) -> None:
    prefix, tail = ids(48), ids(20, seed=1)
    for length in (-1, 0, 1, 5):
        driver = Driver(run_ahead=run_ahead, max_prefill_tokens=max_prefill_tokens)
        prompt = prefix[: 32 + length]
        driver.run("cold", prompt)
        driver.run("again", prompt)
        driver.run("longer", prompt + tail)
        driver.run("shorter", prompt[:21])
        end = (len(prompt) - GENERATION_PROMPT_TOKENS) // 4 * 4
        assert driver.cached["cold"] == 0
        assert end <= driver.cached["again"] < len(prompt)
        assert end <= driver.cached["longer"] <= len(prompt) + 4


@pytest.mark.parametrize("run_ahead", [False, True])
def test_every_turn_of_a_chat_begins_where_the_last_one_was(run_ahead: bool) -> None:
    """Also if the next turn writes the header of the last answer otherwise, as templates do that drop the thinking."""
    for changed in (0, 4, GENERATION_PROMPT_TOKENS):
        driver = Driver(run_ahead=run_ahead)
        prompt = ids(30)
        end_of_last = 0
        for turn in range(6):
            answer = driver.run(f"turn {turn}", prompt, 9)
            assert driver.cached[f"turn {turn}"] >= end_of_last
            end_of_last = (len(prompt) - GENERATION_PROMPT_TOKENS) // 4 * 4
            prompt = [*prompt[: len(prompt) - changed], *([99] * changed), *answer, *ids(11, seed=turn)]
        assert driver.stats.num_hits == 5


def test_a_beginning_that_requests_share_is_saved_when_the_second_one_comes() -> None:
    driver = Driver()
    shared = ids(24)
    for index in range(4):
        driver.run(f"{index}", shared + ids(17, seed=10 + index))
    # The first one saves its own end only. The second finds the pages but no state, and saves it there.
    assert list(driver.cached.values()) == [0, 0, 24, 24]


def test_a_snapshot_has_to_save_the_stride() -> None:
    for length, cached in ((16 + 7, 0), (16 + 8, 16), (40, 32)):
        driver = Driver(stride=16)
        driver.run("cold", ids(length), 1)
        assert driver.stats.num_saved == (cached > 0)
        driver.run("again", ids(length), 1)
        assert driver.cached["again"] == cached


def test_long_prompts_are_saved_at_multiples_of_the_stride() -> None:
    """Where the budget cuts them; so that a shorter prompt, or one that was aborted half way, has something to begin from."""
    driver = Driver(stride=16, max_prefill_tokens=21)
    driver.add("long", ids(150), 2)
    for _ in range(6):
        driver.step()
    driver.engine.abort(["long"])
    driver.run("again", ids(150), 2)
    assert [row.start for plan in driver.plans[:6] for row in plan.rows] == [0, 16, 32, 48, 64, 80]
    assert driver.cached["again"] == 96


def test_what_is_generated_has_one_snapshot_that_moves_along() -> None:
    driver = Driver(stride=8)
    answer = driver.run("first", ids(16), 100)
    assert driver.stats.num_saved == 14  # at 8 and 16 of the prompt, then at 24, 32, ..., 112
    assert driver.stats.num_held == 3
    assert driver.stats.num_evicted == 0
    driver.run("next", ids(16) + answer + ids(9, seed=1))
    assert driver.cached["next"] == 112


def test_what_is_generated_takes_a_quarter_of_the_snapshots() -> None:
    """So that long answers do not push out the prompts that chats go on from."""
    driver = Driver(num_snapshots=8, stride=16, max_running=5, max_prefill_tokens=200)
    prompts = [ids(30, seed=index) for index in range(5)]
    for index, prompt in enumerate(prompts):
        driver.add(f"{index}", prompt, 80)
    driver.drain()
    # ends of prompts at 20, and two of the answers' newest states
    assert driver.stats.num_held == 5 + 2
    for index, prompt in enumerate(prompts):
        driver.run(f"again {index}", prompt, 1)
        assert driver.cached[f"again {index}"] == 20


def test_no_snapshots_and_no_prefix_cache_for_a_pool_of_none() -> None:
    driver = Driver(num_snapshots=0)
    driver.run("cold", ids(40))
    driver.run("again", ids(40))
    assert driver.cached["again"] == 0
    assert [row.num_tokens for row in driver.plans[0].rows] == [40], "nothing is cut for a snapshot that cannot be"


@pytest.mark.parametrize("run_ahead", [False, True])
def test_sixty_four_requests_share_eight_slots(run_ahead: bool) -> None:
    driver = Driver(max_running=8, run_ahead=run_ahead)
    prompts = {f"{index}": ids(5 + index, seed=index) for index in range(64)}
    for name, prompt in prompts.items():
        driver.add(name, prompt, 10)
    driver.drain()
    for name, prompt in prompts.items():
        assert driver.tokens[name] == expected_output(prompt, 3, 10, NONE)
    ends = [int(output.request_id) for output in driver.ends]
    assert max(abs(place - index) for place, index in enumerate(ends)) <= 8, "in order of arrival, within a batch"
    assert max(len(plan.rows) for plan in driver.plans) == 8


class PoisonedRunner(FakeRunner):
    """The numbers of the row that reaches this position are not finite."""

    position = 43

    def _sample(self, row: Row) -> RowResult:
        result = super()._sample(row)
        if row.start + row.num_tokens == self.position:
            return RowResult(token_id=None, error="not finite")
        return result


@pytest.mark.parametrize("run_ahead", [False, True])
def test_nothing_of_a_request_with_bad_numbers_is_found_again(run_ahead: bool) -> None:
    runner = PoisonedRunner(200, 4, recurrent=True)
    driver = Driver(run_ahead=run_ahead, runner=runner)
    driver.run("before", ids(24))
    driver.add("bad", ids(40), 10)
    driver.drain()
    assert driver.cached["bad"] == 24
    assert [output.finish_reason for output in driver.ends] == ["length", "error"]
    runner.position = -1
    driver.run("after", ids(40), 10)
    assert driver.cached["after"] == 0
    stats = driver.engine.scheduler.stats()
    assert stats.num_free_pages == stats.num_pages


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_step_that_fails_saves_nothing(run_ahead: bool) -> None:
    driver = Driver(run_ahead=run_ahead)

    def fail(plan: StepPlan) -> None:
        if any(row.snapshot is not None for row in plan.rows):
            raise RuntimeError("boom")

    driver.runner._fail_when = fail
    driver.add("hit", ids(40))
    driver.drain()
    assert [output.finish_reason for output in driver.ends] == ["error"]
    assert (driver.stats.num_held, driver.stats.num_saved) == (0, 0)
    driver.runner._fail_when = None
    driver.run("after", ids(40))
    assert driver.stats.num_held == driver.stats.num_saved > 0
