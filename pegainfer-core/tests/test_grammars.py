"""Compiling grammars: what is refused and in which words, the time limit, what is kept, and the builder of grammars."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from pegainfer_core import structured
from pegainfer_core.engine import Engine
from pegainfer_core.errors import RequestError
from pegainfer_core.grammar_admission import GrammarAdmission
from pegainfer_core.grammars import MAX_KEPT, CompiledGrammar, Grammars
from pegainfer_core.kv.cache import KVCache
from pegainfer_core.messages import AddRequest, RequestOutput
from pegainfer_core.sampling_params import SamplingParams
from pegainfer_core.scheduler import Scheduler, SchedulerLimits
from pegainfer_core.structured import Grammar, LarkBuilder
from pegainfer_core.testing.fake_runner import VOCAB_SIZE, FakeRunner
from pegainfer_core.testing.tiny_tokenizer import EOS_ID, START_ID, write_tiny_tokenizer
from pegainfer_core.tokenizer import Tokenizer, load_tokenizer

EOS = frozenset({EOS_ID})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(path)
    return load_tokenizer(path)


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, VOCAB_SIZE, EOS)


class StuckGrammars(Grammars):
    """Compiles when it is told to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(lambda: tokenizer, VOCAB_SIZE, EOS)
        self.go_on = threading.Event()

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        self._ll_tokenizer()
        assert self.go_on.wait(60)
        return super()._compile(grammar)


@pytest.fixture
def stuck(tokenizer: Tokenizer) -> Iterator[StuckGrammars]:
    made = StuckGrammars(tokenizer)
    yield made
    made.go_on.set()


def make_engine(admission: GrammarAdmission | None) -> Engine:
    limits = SchedulerLimits(
        max_model_len=64,
        max_prefill_tokens=64,
        max_running_requests=4,
        max_waiting_requests=100,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS,
    )
    return Engine(Scheduler(limits, KVCache(40, 4)), FakeRunner(40, 4), grammars=admission)


def add(name: str, grammar: Grammar | None) -> AddRequest:
    return AddRequest(name, [5, 6, 7], SamplingParams(max_tokens=3, seed=1, grammar=grammar))


def ends(engine: Engine) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    while engine.has_work:
        found |= {each.request_id: each for each in engine.step().outputs if each.finish_reason is not None}
    return found


# refusals


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (structured.regex("(["), "unclosed character class"),
        (structured.regex("(?=a)b"), "look-around"),
        (structured.json_schema({"type": "object", "not": {"required": ["a"]}}), "unsupported keywords: not"),
        (structured.json_schema({"properties": {"a": {"uniqueItems": True}}}), "unsupported keywords: uniqueItems"),
        (structured.json_schema({"type": "objekt"}), "objekt"),
        (structured.json_schema({"type": "string", "format": "colour"}), "Unknown format: colour"),
        (structured.json_schema({"$ref": "#/$defs/none"}), "/\\$defs/none"),
        (structured.json_schema({"$ref": "#"}), "there is no text that it allows"),
        (structured.json_schema({"$ref": "http://example.org/schema"}), "does not fetch"),
        (structured.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (structured.json_schema(False), "Unsatisfiable"),
        (structured.json_schema({"type": "integer", "multipleOf": 1000003}), "multipleOf: values up to"),
        (structured.json_schema({"items": [{"multipleOf": 150.5}] * 200}), "multipleOf: values up to"),
        (structured.lark("start: ((("), "Expected"),
        (structured.lark("start: nothing"), "unknown name"),
        (structured.lark("start: <no_such_token>"), "unknown special token"),
        (structured.lark("root ::= ("), "."),
    ],
)
def test_a49_what_cannot_be_compiled_is_refused_with_the_reason(
    grammars: Grammars, grammar: Grammar, said: str
) -> None:
    engine = make_engine(GrammarAdmission(grammars))
    engine.add(add("bad", grammar))
    engine.add(add("good", structured.regex("a+")))
    engine.add(add("free", None))
    ended = ends(engine)
    assert ended["bad"].finish_reason == "rejected" and ended["bad"].rejection == "invalid_grammar"
    assert ended["bad"].error is not None and ended["bad"].error.startswith("grammar: ")
    assert ended["bad"].rejected_param == "grammar"
    with pytest.raises(RequestError, match=said):
        raise RequestError(ended["bad"].error)
    assert ended["good"].finish_reason != "rejected" and ended["free"].finish_reason != "rejected"


def test_without_strict_what_cannot_be_enforced_is_left_out(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "not": {}}
    for grammar in (structured.json_schema(schema, strict=False), structured.json_schema(True)):
        assert grammars.compile(grammar).exception(60) is None
    with pytest.raises(ValueError, match="unsupported keywords: not"):
        grammars.compile(structured.json_schema(schema)).result(60)


def test_an_engine_without_grammars_refuses_them() -> None:
    engine = make_engine(None)
    engine.add(add("one", structured.json_object()))
    assert ends(engine)["one"].error == "this engine takes no grammars"


def test_a_grammar_that_takes_too_long_is_refused_and_nobody_waits_for_it(stuck: StuckGrammars) -> None:
    engine = make_engine(GrammarAdmission(stuck, seconds=0.0))
    engine.add(add("slow", structured.json_object()))
    engine.add(add("free", None))
    ended = ends(engine)
    assert ended["slow"].error == "grammar: the grammar was not compiled within 0 seconds; simplify it"
    assert ended["free"].finish_reason != "rejected"


def test_the_others_run_while_a_grammar_is_compiled(stuck: StuckGrammars) -> None:
    engine = make_engine(GrammarAdmission(stuck))
    engine.add(add("slow", structured.json_object()))
    engine.add(add("free", None))
    outputs: list[RequestOutput] = []
    while not any(output.finish_reason for output in outputs):
        outputs += engine.step().outputs
    assert {output.request_id for output in outputs} == {"free"} and engine.has_work
    engine.step()  # sleeps a moment: there is nothing to compute
    stuck.go_on.set()
    assert ends(engine)["slow"].finish_reason in ("stop", "length")


def test_a_request_can_be_aborted_before_its_grammar_is_compiled(stuck: StuckGrammars) -> None:
    engine = make_engine(GrammarAdmission(stuck))
    engine.add(add("slow", structured.json_object()))
    engine.abort(["slow", "unknown"])
    assert {name: end.finish_reason for name, end in ends(engine).items()} == {"slow": "abort"}
    assert not engine.has_work


def test_too_many_that_wait_are_refused(stuck: StuckGrammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pegainfer_core.grammar_admission.MAX_COMPILING", 1)
    engine = make_engine(GrammarAdmission(stuck))
    engine.add(add("first", structured.json_object()))
    engine.add(add("second", structured.json_object()))
    stuck.go_on.set()
    ended = ends(engine)
    assert ended["second"].rejection == "queue_full" and ended["first"].rejection is None


def test_loading_the_vocabulary_does_not_count(tokenizer: Tokenizer) -> None:
    go_on = threading.Event()

    def load() -> Tokenizer:
        assert go_on.wait(60)
        return tokenizer

    grammars = Grammars(load, VOCAB_SIZE, EOS)
    engine = make_engine(GrammarAdmission(grammars, seconds=0.0))
    engine.add(add("first", structured.json_object()))
    assert engine.step().outputs == []
    go_on.set()
    assert ends(engine)["first"].finish_reason is not None


def test_a_missing_library_is_named(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    engine = make_engine(GrammarAdmission(grammars))
    engine.add(add("one", structured.json_object()))
    error = ends(engine)["one"].error
    assert error is not None and "needs the package llguidance" in error


# what is kept


def test_equal_grammars_are_compiled_once_and_old_ones_dropped(grammars: Grammars) -> None:
    first = structured.choice(["first"], field="guided_choice")
    compiled = grammars.compile(first)
    assert grammars.compile(structured.choice(["first"], field="structured_outputs")) is compiled
    grammars.release(first)
    futures: list[Future[CompiledGrammar]] = []
    for number in range(MAX_KEPT + 10):
        grammar = structured.choice([f"choice {number}"])
        futures.append(grammars.compile(grammar))
        grammars.release(grammar)
    assert grammars.compile(first) is compiled, "it is in use"
    assert grammars.compile(structured.choice(["choice 0"])) is not futures[0]
    assert grammars.compile(structured.choice([f"choice {MAX_KEPT}"])) is futures[MAX_KEPT]


# the builder


def accepted(grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, parts: list[str | int]) -> bool:
    """Whether the texts and token ids are, together, one of the grammar's texts."""
    grammars.compile(grammar).result(60)
    matcher = grammars.matcher(grammar)
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else tokenizer.encode(part))]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_expressions_of_the_builder(grammars: Grammars, tokenizer: Tokenizer) -> None:
    builder = LarkBuilder()
    grammar = builder.build(
        builder.sequence(
            builder.token(START_ID),
            builder.pattern("[a/b]\n?"),
            builder.optional(builder.text('"\\\n\u00e4')),
            builder.up_to("</x>"),
            builder.one_or_more(builder.any_of([builder.text("!"), builder.json({"type": "integer"})]), ";"),
        )
    )
    assert accepted(grammars, tokenizer, grammar, [START_ID, '/\n"\\\n\u00e4a < b </y>\n\n</x>!'])
    assert accepted(grammars, tokenizer, grammar, [START_ID, "a</x>!;12;!"])
    assert not accepted(grammars, tokenizer, grammar, ["a</x>!"])
    assert not accepted(grammars, tokenizer, grammar, ["<|im_start|", ">a</x>!"])
    assert not accepted(grammars, tokenizer, grammar, [START_ID, "a</x></x>!"])
    assert not accepted(grammars, tokenizer, grammar, [START_ID, "a</x>!12"])
