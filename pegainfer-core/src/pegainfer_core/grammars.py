"""Grammars, compiled: from the specification to a matcher that says which tokens may come next.

Owns the library (llguidance), its limits, the vocabulary as it sees it, and the cache of compiled grammars. Compiles in threads of its own,
so that the step loop never waits. Knows nothing of requests, slots or logits. No torch.
"""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from pegainfer_core.errors import RequestError
from pegainfer_core.structured import JSON_WHITESPACE, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from pegainfer_core.tokenizer import Tokenizer

THREADS = 2
MAX_KEPT = 128
"""Compiled grammars kept for later requests, beside those in use."""
MAX_MULTIPLES = 200_000
"""Sum of a schema's multipleOf values, written as integers: the compiler builds an automaton of that many states."""
MAX_LEXER_STATES = 50_000
"""Of one grammar, made while it is used; each takes 1 to 2 kB. Ordinary schemas need hundreds."""
MAX_MESSAGE = 600  # characters of the compiler's words that a client sees

Key = tuple[str, str, bool]


class CompiledGrammar:
    """A grammar for one vocabulary. Matchers are copies that share what is immutable."""

    def __init__(self, template: LLMatcher) -> None:
        self._template = template
        self._lock = threading.Lock()

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning."""
        with self._lock:
            return self._template.deep_copy()


class Grammars:
    """The grammars of one engine. Only `compile`, `matcher` and `release` are called, all from the engine's thread."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Nothing is loaded before the first grammar comes."""
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self.loaded_at: float | None = None
        """When the vocabulary was there (monotonic), which the first grammar waits for; None before."""
        self._loading = threading.Lock()
        self._compiled: collections.OrderedDict[Key, Future[CompiledGrammar]] = collections.OrderedDict()
        """By last use."""
        self._users: collections.Counter[Key] = collections.Counter()
        self._asked: collections.deque[tuple[Grammar, Future[CompiledGrammar]]] = collections.deque()
        self._num_threads = 0
        self._turn = threading.Lock()
        """Guards the two above."""

    def compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Begin to compile, or find what is compiled. It is kept at least until as many calls of `release`.

        The future raises ValueError with the reason if the grammar cannot be compiled.
        """
        key = _key(grammar)
        future = self._compiled.get(key)
        if future is None:
            future = self._compiled[key] = Future()
            self._hand_over(grammar, future)
        self._compiled.move_to_end(key)
        self._users[key] += 1
        return future

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning of a grammar that is compiled and in use."""
        return self._compiled[_key(grammar)].result(timeout=0).matcher()

    def release(self, grammar: Grammar) -> None:
        """One user less."""
        key = _key(grammar)
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
        unused = [kept for kept in self._compiled if kept not in self._users]
        for old in unused[: max(0, len(unused) - MAX_KEPT)]:
            del self._compiled[old]

    def _hand_over(self, grammar: Grammar, future: Future[CompiledGrammar]) -> None:
        """To a thread, which ends when there is nothing left: a daemon, because a compilation cannot be interrupted."""
        with self._turn:
            self._asked.append((grammar, future))
            if self._num_threads < THREADS:
                self._num_threads += 1
                threading.Thread(target=self._work, name="pegainfer-grammars", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._turn:
                if not self._asked:
                    self._num_threads -= 1
                    return
                grammar, future = self._asked.popleft()
            try:
                future.set_result(self._compile(grammar))
            except Exception as error:
                future.set_exception(error)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise ValueError(f"structured output needs the package llguidance here ({error})") from error
        tokenizer = self._ll_tokenizer()
        try:
            source = _source(grammar)
        except RecursionError:
            raise ValueError("nested too deep") from None
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(_words(matcher.get_error()))
        first = matcher.deep_copy()
        if not any(first.compute_bitmask()) or first.is_error():  # such as a schema that is only a reference to itself
            raise ValueError("there is no text that it allows")
        return CompiledGrammar(matcher)

    def _ll_tokenizer(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = _make_tokenizer(self._load_tokenizer(), self._vocab_size, self._eos_token_ids)
                self.loaded_at = time.monotonic()
            return self._tokenizer


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask: one bit for each id, and one for the end of the text, which is no id of the model's."""
    return (vocab_size + 1 + 31) // 32


def _key(grammar: Grammar) -> Key:
    return grammar.kind, grammar.text, grammar.strict


# the vocabulary


class _Vocabulary:
    """What llguidance asks of a tokenizer. The end of a text is an id of its own behind the model's, because which of the model's end a
    request is the request's affair."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        special = (tokenizer.special_ids | eos_token_ids) & set(range(vocab_size))
        self.tokens = [
            (tokenizer.token_text(i).encode() if i in special else tokenizer.token_bytes(i)) for i in range(vocab_size)
        ]
        self.eos_token_id = vocab_size
        self.tokens.append(b"<|end of text|>")
        self.special_token_ids = [*sorted(special), vocab_size]

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text that the grammar forces."""
        return self._tokenizer.encode(
            text if isinstance(text, str) else text.decode("utf-8", "replace"), add_special_tokens=False
        )


def _make_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    if tokenizer.byte_table is None:
        raise ValueError("this model's tokenizer has no bytes for single tokens; grammars need them")
    vocabulary = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size + 1)


# the languages


def _source(grammar: Grammar) -> str:
    """The specification in llguidance's own terms. Raises ValueError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_literal, json.loads(grammar.text))))
    if grammar.kind == "lark":
        try:
            return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
        except Exception as error:  # the converter raises plain Exception
            raise ValueError(_words(str(error))) from None
    schema: Any = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
    if isinstance(schema, bool):  # true is any JSON, false is none
        schema = {} if schema else {"enum": []}
    _check_multiples(schema)
    options: Any = {"whitespace_pattern": JSON_WHITESPACE, "lenient": not grammar.strict}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _check_multiples(schema: Any) -> None:
    total = sum(_multiples(schema))
    if total > MAX_MULTIPLES:
        raise ValueError(f"multipleOf: values up to {MAX_MULTIPLES} together are supported, got {total}")


def _multiples(schema: Any) -> Iterator[int]:
    if isinstance(schema, list):
        for item in schema:
            yield from _multiples(item)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "multipleOf" and type(value) in (int, float):
                number = Decimal(str(value))
                exponent = number.as_tuple().exponent
                yield int(number.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else number)
            else:
                yield from _multiples(value)


def _words(message: str) -> str:
    """The compiler's message, fit for a client."""
    head, found, keys = message.partition("Unimplemented keys: ")
    if found:
        try:
            names = ", ".join(msgspec.json.decode(keys.strip(), type=list[str]))
            return f"{head}unsupported keywords: {names}"
        except msgspec.MsgspecError:
            pass
    return message.strip()[:MAX_MESSAGE]


def refusal(grammar: Grammar, reason: str) -> RequestError:
    """What the client is told."""
    return RequestError(f"{grammar.field}: {reason}", "invalid_grammar", param=grammar.field)
