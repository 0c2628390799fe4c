"""How many prompt tokens ride along in a step."""

from hypothesis import given
from hypothesis import strategies as st
from pegainfer_core.step_sizes import MIXED_DECODE_ROWS, MIXED_TOKENS, at_least, prompt_tokens_beside

ROWS = st.integers(1, 512)
BACKLOG = st.integers(0, 1 << 20)
MOST = st.integers(1, 1 << 16)


@given(ROWS, BACKLOG, MOST)
def test_a_chunk_is_bounded_and_fills_a_padded_step(decode_rows: int, backlog: int, most: int) -> None:
    tokens = prompt_tokens_beside(decode_rows, backlog, most)
    assert 1 <= tokens <= most
    if tokens < most:
        assert tokens + at_least(MIXED_DECODE_ROWS, decode_rows) in MIXED_TOKENS


@given(ROWS, BACKLOG, BACKLOG, MOST)
def test_more_waiting_tokens_never_make_a_shorter_chunk(decode_rows: int, one: int, other: int, most: int) -> None:
    few, many = sorted((one, other))
    assert prompt_tokens_beside(decode_rows, few, most) <= prompt_tokens_beside(decode_rows, many, most)


def test_few_streams_get_short_chunks_and_none_get_the_longest() -> None:
    assert prompt_tokens_beside(0, 10, 3200) == 3200
    assert prompt_tokens_beside(8, 1024, 3200) == 384 - 8
    assert prompt_tokens_beside(128, 1024, 3200) == 1536 - 128
    assert prompt_tokens_beside(8, 300_000, 3200) == 3200
