"""Threads and staging buffers bring every byte to its place, whatever the layout of files and the order of copies."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegainfer_core.errors import CheckpointError
from pegainfer_core.stored_tensors import SUPPORTED_DTYPES, StoredTensor, equal_bytes, stored_tensors
from pegainfer_core.testing.corrupt import truncate_file_of
from pegainfer_core.weight_transfer import Move, transfer
from safetensors.torch import save_file
from torch import Tensor

CPU = torch.device("cpu")
DTYPES = list(SUPPORTED_DTYPES.values())


class LateCopy:
    """A device that copies as late as it may: when the buffer is wanted again. Too early a reuse gives wrong values."""

    opened = 0
    closed = 0

    def __init__(self) -> None:
        self.buffers_given: list[Tensor] = []
        self.waiting = 0
        LateCopy.opened += 1

    def buffers(self, count: int, num_bytes: int) -> list[Tensor]:
        assert not self.buffers_given, "buffers are asked for once"
        self.buffers_given = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(count)]
        return list(self.buffers_given)

    def start(self, staged: Tensor, destination: Tensor) -> Callable[[], None]:
        assert any(staged.data_ptr() == buffer.data_ptr() for buffer in self.buffers_given)
        self.waiting += 1
        done = False

        def wait() -> None:
            nonlocal done
            if not done:
                destination.copy_(staged)
                self.waiting -= 1
            done = True

        return wait

    def close(self) -> None:
        assert self.waiting == 0, "closed before its copies ended"
        LateCopy.closed += 1


def write_checkpoint(path: Path, values: Sequence[Tensor], num_shards: int) -> dict[str, StoredTensor]:
    """Tensors t0, t1, ... in files by turns, as an index lists them."""
    named = {f"t{index}": value for index, value in enumerate(values)}
    files = {name: f"{index % num_shards}.safetensors" for index, name in enumerate(named)}
    for file in set(files.values()):
        save_file({name: value for name, value in named.items() if files[name] == file}, path / file)
    entries = ", ".join(f'"{name}": "{file}"' for name, file in files.items())
    (path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{entries}}}}}')
    return stored_tensors(path)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Every pattern of bits, NaN and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    limits = torch.iinfo(bits)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=bits, generator=generator).view(dtype)


def as_cast(found: Tensor, stored: Tensor) -> bool:
    """Whether `found` is `stored`, cast: bit for bit, but that a cast may change which NaN it is."""
    expected = stored.to(found.dtype)
    if found.dtype != stored.dtype:
        if not torch.equal(found.isnan(), expected.isnan()):
            return False
        found, expected = found.nan_to_num(0.0), expected.nan_to_num(0.0)
    return torch.equal(found.flatten().view(torch.uint8), expected.flatten().view(torch.uint8))


tensors = st.tuples(
    st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple), st.sampled_from(DTYPES), st.sampled_from(DTYPES)
)


@settings(max_examples=60, deadline=None)
@given(
    specs=st.lists(tensors, min_size=1, max_size=6),
    num_shards=st.integers(1, 3),
    chunk_bytes=st.sampled_from([4, 5, 8, 12, 30, 64, 1 << 20]),
    num_threads=st.integers(1, 4),
    late=st.booleans(),
)
def test_any_layout_gives_the_same_bits(
    specs: list[tuple[tuple[int, ...], torch.dtype, torch.dtype]],
    num_shards: int,
    chunk_bytes: int,
    num_threads: int,
    late: bool,
) -> None:
    values = [random_bits(shape, stored, seed) for seed, (shape, stored, _) in enumerate(specs)]
    destinations = [torch.empty(shape, dtype=wanted) for shape, _, wanted in specs]
    told: list[int] = []
    with tempfile.TemporaryDirectory() as directory:
        stored = write_checkpoint(Path(directory), values, num_shards)
        transfer(
            [Move(stored[f"t{index}"], destination) for index, destination in enumerate(destinations)],
            CPU,
            told.append,
            open_copy=LateCopy if late else None,
            num_threads=num_threads,
            chunk_bytes=chunk_bytes,
        )
    for value, destination in zip(values, destinations, strict=True):
        assert as_cast(destination, value)
    assert sum(told) == sum(value.nbytes for value in values)
    assert all(0 < count <= chunk_bytes for count in told)


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, StoredTensor]:
    return write_checkpoint(tmp_path, [torch.arange(100.0), torch.arange(100.0), -torch.arange(100.0)], 2)


def test_every_thread_closes_its_copy(stored: dict[str, StoredTensor]) -> None:
    LateCopy.opened = LateCopy.closed = 0
    move = Move(stored["t0"], torch.empty(100))
    transfer([move], CPU, lambda _: None, open_copy=LateCopy, num_threads=3, chunk_bytes=16)
    assert (LateCopy.opened, LateCopy.closed) == (3, 3)


def test_slices_of_a_stack_are_filled_in_place(stored: dict[str, StoredTensor]) -> None:
    stack = torch.empty(300, dtype=torch.float64).fill_(7.0).to(torch.bfloat16)
    transfer([Move(stored["t2"], stack[100:200])], CPU, lambda _: None, chunk_bytes=36)
    assert torch.equal(stack[100:200], (-torch.arange(100.0)).to(torch.bfloat16))
    assert stack[:100].eq(7.0).all() and stack[200:].eq(7.0).all()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_file_cut_off_after_its_header_was_read_is_named(
    tmp_path: Path, stored: dict[str, StoredTensor], num_threads: int
) -> None:
    truncate_file_of(tmp_path, "t2", 40)
    with pytest.raises(CheckpointError, match=r"0\.safetensors: tensor t2 cannot be read: the file was cut off"):
        transfer([Move(stored["t2"], torch.empty(100))], CPU, lambda _: None, num_threads=num_threads, chunk_bytes=16)


def test_a_file_that_is_gone_is_named(tmp_path: Path, stored: dict[str, StoredTensor]) -> None:
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1\.safetensors: tensor t1 cannot be read: .*No such file"):
        transfer([Move(stored["t1"], torch.empty(100))], CPU, lambda _: None)


def test_what_a_copy_raises_ends_the_transfer(stored: dict[str, StoredTensor]) -> None:
    class Broken(LateCopy):
        def start(self, staged: Tensor, destination: Tensor) -> Callable[[], None]:
            raise RuntimeError("no device any more")

    with pytest.raises(RuntimeError, match="no device any more"):
        transfer(
            [Move(stored["t0"], torch.empty(100))], CPU, lambda _: None, open_copy=Broken, num_threads=3, chunk_bytes=8
        )


def test_what_the_listener_raises_ends_the_transfer(stored: dict[str, StoredTensor]) -> None:
    calls = itertools.count()

    def listen(_: int) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer([Move(stored["t0"], torch.empty(100))], CPU, listen, open_copy=LateCopy, chunk_bytes=8)


def test_equal_bytes(stored: dict[str, StoredTensor]) -> None:
    assert equal_bytes(stored["t0"], stored["t1"])
    assert not equal_bytes(stored["t0"], stored["t2"])


def test_equal_bytes_needs_equal_shapes_and_types(tmp_path: Path) -> None:
    values = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(8, dtype=torch.float16)]
    stored = write_checkpoint(tmp_path, values, 1)
    assert equal_bytes(stored["t0"], stored["t0"])
    assert not equal_bytes(stored["t0"], stored["t1"])
    assert not equal_bytes(stored["t0"], stored["t2"])
