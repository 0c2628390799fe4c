"""The prompt field of completions, in its four forms, as token ids.

Owns reading and checking it, and where tokenizing runs. Knows nothing of sampling.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
from pegainfer_core.messages import EngineInfo
from pegainfer_core.tokenizer import Tokenizer

from pegainfer_server.http_errors import ApiError, bad_request, context_exceeded

T = TypeVar("T")

INLINE_SIZE = 4096  # tokenizing that many characters takes about a millisecond; more goes to a thread
LARGE_SIZE = 1 << 18  # tokenizing takes a hundred times the text's memory, so larger texts take turns
_LARGE = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pegainfer-large-text")


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, ready for the engine."""

    ids: list[int]
    text: str | None
    """As it was given; None if token ids were."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread if `size` characters or tokens are enough to hold up other requests' tokens."""
    if size <= INLINE_SIZE:
        return work()
    if size <= LARGE_SIZE:
        return await asyncio.to_thread(work)
    return await asyncio.get_running_loop().run_in_executor(_LARGE, work)


async def read_prompts(
    value: Any, tokenizer: Tokenizer, info: EngineInfo, *, most: int, add_special_tokens: bool
) -> list[Prompt]:
    """The prompts in order, at most `most`.

    Raises ApiError or RequestError for an empty one, one that is longer than the context, an id outside the vocabulary, or any other
    form.
    """
    items = _split(value, info.max_model_len, most)

    def read() -> list[Prompt]:
        return [_read(item, tokenizer, info, add_special_tokens) for item in items]

    return await off_loop(sum(len(item) for item in items if isinstance(item, str)), read)


def _read(item: str | list[int], tokenizer: Tokenizer, info: EngineInfo, add_special_tokens: bool) -> Prompt:
    if isinstance(item, str):
        return Prompt(encode_text(item, tokenizer, info, add_special_tokens=add_special_tokens), item)
    check_ids(item, info.vocab_size, "prompt")
    return Prompt(item, None)


def encode_text(text: str, tokenizer: Tokenizer, info: EngineInfo, *, add_special_tokens: bool) -> list[int]:
    """Ids of a prompt. Raises ApiError if there are none, and RequestError if there are far more than the context has room for."""
    tokenizer.check_length(text, info.max_model_len, "prompt")
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens) if text else []
    if not ids:
        raise _empty()
    return ids


def check_ids(ids: list[int], vocab_size: int, name: str) -> None:
    """Raise ApiError unless there are ids and all are in the vocabulary."""
    if not ids:
        raise _empty(name)
    if not _fits(ids, _ids_below(vocab_size)):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise bad_request(f"{name}: token id {wrong} is outside the vocabulary (0 to {vocab_size - 1})", name)


def _split(value: Any, max_model_len: int, most: int) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong_form()
    if not value:
        raise _empty()
    if _are_ids(value, max_model_len):
        return [value]
    if len(value) > most:
        raise bad_request(f"prompt: at most {most} prompts are taken here, got {len(value)}", "prompt")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if all(isinstance(item, list) and _are_ids(item, max_model_len) for item in value):
        return list(value)
    raise _wrong_form()


def _are_ids(items: list[Any], max_model_len: int) -> bool:
    """Whether these are token ids. Raises ApiError for more of them than the context has, before each is looked at."""
    if items and type(items[0]) is not int:  # bool is an int for isinstance
        return False
    if len(items) > max_model_len:
        raise context_exceeded(len(items), max_model_len)
    return _fits(items, list[int])


@lru_cache(maxsize=1)
def _ids_below(vocab_size: int) -> Any:
    return list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]


def _fits(items: list[Any], kind: Any) -> bool:
    """Whether every item is of the kind, told without a loop in Python: that would take a millisecond for a long prompt."""
    try:
        msgspec.convert(items, kind)
    except msgspec.ValidationError:
        return False
    return True


def _wrong_form() -> ApiError:
    return bad_request(
        "prompt: must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
        "prompt",
        "invalid_value",
    )


def _empty(name: str = "prompt") -> ApiError:
    return bad_request(f"{name}: must not be empty", name, "invalid_value")
