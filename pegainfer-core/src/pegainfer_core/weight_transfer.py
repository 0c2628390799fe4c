"""Brings stored tensors to where they belong: threads read files piece by piece, through staging buffers where needed.

Owns threads, buffers and the order of reading and copying. Knows nothing of models. Invariant: each byte is read once,
a staging buffer is not written again before the copy out of it ended, and when `transfer` returns everything is in
place and the buffers are gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import mmap
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pegainfer_core.errors import CheckpointError
from pegainfer_core.stored_tensors import StoredTensor, read_into

CHUNK_BYTES = 8 << 20
NUM_THREADS = 8
"""Readers: more threads, not larger chunks, buy speed."""
BUFFERS_PER_THREAD = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """One stored tensor and its destination: contiguous, of as many values, of any floating type, on any device."""

    source: StoredTensor
    destination: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A run of values of one move."""

    source: StoredTensor
    destination: Tensor
    """One-dimensional."""
    offset: int
    """In the file."""

    @property
    def num_bytes(self) -> int:
        """As stored."""
        return self.destination.numel() * self.source.torch_dtype.itemsize


class DeviceCopy(Protocol):
    """How one thread gets values from staging buffers to the device."""

    def buffers(self, count: int, num_bytes: int) -> list[Tensor]:
        """Staging buffers (uint8, on the CPU), valid until `close`."""
        ...

    def start(self, staged: Tensor, destination: Tensor) -> Callable[[], None]:
        """Begin to copy, casting if the types differ; the function returned waits until `staged` may be written again."""
        ...

    def close(self) -> None:
        """Give the buffers back. Every copy has been waited for."""
        ...


class HostCopy:
    """Copies within the CPU's memory, at once."""

    def buffers(self, count: int, num_bytes: int) -> list[Tensor]:
        """See DeviceCopy; one is enough."""
        del count
        return [torch.empty(num_bytes, dtype=torch.uint8)]

    def start(self, staged: Tensor, destination: Tensor) -> Callable[[], None]:
        """See DeviceCopy."""
        destination.copy_(staged)
        return lambda: None

    def close(self) -> None:
        """See DeviceCopy."""


class CudaCopy:
    """Copies on a stream of its own from page-locked memory, which goes back to the system in the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device = torch.empty(0, device=device).device  # with its index
        torch.cuda.set_device(device)  # of this thread
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The destinations' memory may still be in use by what was queued before.
        self._stream.wait_stream(torch.cuda.default_stream(device))
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._buffers: list[Tensor] = []

    def buffers(self, count: int, num_bytes: int) -> list[Tensor]:
        """See DeviceCopy. Registered here, not taken from torch's allocator, which would keep the memory."""
        for _ in range(count):
            buffer = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)  # whole pages, unlike malloc's
            torch.cuda.check_error(int(self._runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0)))
            self._buffers.append(buffer)
        return list(self._buffers)

    def start(self, staged: Tensor, destination: Tensor) -> Callable[[], None]:
        """See DeviceCopy."""
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            if staged.dtype == destination.dtype:
                destination.copy_(staged, non_blocking=True)
            else:
                destination.copy_(staged.to(self._device, non_blocking=True))
            copied.record(self._stream)
        wait: Callable[[], None] = copied.synchronize
        return wait

    def close(self) -> None:
        """See DeviceCopy."""
        self._stream.synchronize()
        for buffer in self._buffers:
            torch.cuda.check_error(int(self._runtime.cudaHostUnregister(buffer.data_ptr())))
        self._buffers.clear()


def transfer(
    moves: Sequence[Move],
    device: torch.device,
    on_bytes: Callable[[int], None],
    *,
    open_copy: Callable[[], DeviceCopy] | None = None,
    num_threads: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Fill every destination, all of which are on `device`.

    `on_bytes` is told, in this thread, how many stored bytes came to their place. `open_copy` is called once in each
    thread; None: what fits the device. Raises CheckpointError if a file cannot be read.
    """
    on_gpu = device.type == "cuda"
    if open_copy is None:
        open_copy = (lambda: CudaCopy(device)) if on_gpu else HostCopy
    if num_threads is None:
        num_threads = NUM_THREADS if on_gpu else _num_host_threads(moves)
    chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    for move in sorted(moves, key=lambda move: (move.source.file, move.source.offset)):
        for chunk in _chunks(move, chunk_bytes):
            chunks.put(chunk)
    news: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    threads = [
        threading.Thread(target=_work, args=(chunks, open_copy, chunk_bytes, news, stop), daemon=True)
        for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    try:
        running = len(threads)
        while running:
            item = news.get()
            if isinstance(item, int):
                on_bytes(item)
            elif item is None:
                running -= 1
            else:
                raise item
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _num_host_threads(moves: Sequence[Move]) -> int:
    """On a CPU torch's own threads share each cast, so that one reader is enough where there are casts."""
    casts = any(move.source.torch_dtype != move.destination.dtype for move in moves)
    return 1 if casts else min(NUM_THREADS, torch.get_num_threads())


def _chunks(move: Move, chunk_bytes: int) -> list[Chunk]:
    """A move cut into runs of at most `chunk_bytes`; none if it has no values."""
    size = move.source.torch_dtype.itemsize
    assert chunk_bytes >= size and move.destination.numel() == move.source.num_values
    values, most = move.destination.view(-1), chunk_bytes // size
    return [
        Chunk(move.source, values[start : start + most], move.source.offset + start * size)
        for start in range(0, values.numel(), most)
    ]


def _work(
    chunks: queue.SimpleQueue[Chunk],
    open_copy: Callable[[], DeviceCopy],
    chunk_bytes: int,
    news: queue.SimpleQueue[int | BaseException | None],
    stop: threading.Event,
) -> None:
    """One thread's part: take chunks until none is left. The last news are None, or what went wrong."""
    try:
        with contextlib.ExitStack() as stack:
            lane = _Lane(open_copy(), chunk_bytes)
            stack.callback(lane.close)
            files = _Files(stack)
            while not stop.is_set():
                try:
                    chunk = chunks.get_nowait()
                except queue.Empty:
                    break
                lane.bring(chunk, files)
                news.put(chunk.num_bytes)
    except BaseException as error:  # the waiting thread raises it
        news.put(error)
    else:
        news.put(None)


class _Files:
    """Open files of one thread."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._opened: dict[Path, io.FileIO] = {}

    def read(self, source: StoredTensor, offset: int, place: Tensor) -> None:
        """Fill `place` from `offset` on."""
        try:
            if source.file not in self._opened:
                self._opened[source.file] = self._stack.enter_context(source.file.open("rb", buffering=0))
            complete = read_into(self._opened[source.file], offset, place)
        except OSError as error:
            raise CheckpointError(f"{source.file}: tensor {source.name} cannot be read: {error}") from error
        if not complete:
            raise CheckpointError(f"{source.file}: tensor {source.name} cannot be read: the file was cut off")


class _Lane:
    """A ring of staging buffers and the copies out of them. Without a cast on a CPU nothing is staged."""

    def __init__(self, copy: DeviceCopy, chunk_bytes: int) -> None:
        self._copy = copy
        self._chunk_bytes = chunk_bytes
        self._buffers: list[Tensor] = []
        self._waits: list[Callable[[], None]] = []
        """What to wait for before each buffer is written again."""
        self._next = 0

    def bring(self, chunk: Chunk, files: _Files) -> None:
        """Read one chunk and begin its copy."""
        dtype = chunk.source.torch_dtype
        if isinstance(self._copy, HostCopy) and dtype == chunk.destination.dtype:
            files.read(chunk.source, chunk.offset, chunk.destination.view(torch.uint8))
            return
        if not self._buffers:
            self._buffers = self._copy.buffers(BUFFERS_PER_THREAD, self._chunk_bytes)
            self._waits = [lambda: None] * len(self._buffers)
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        self._waits[index]()
        staged = self._buffers[index][: chunk.num_bytes]
        files.read(chunk.source, chunk.offset, staged)
        self._waits[index] = self._copy.start(staged.view(dtype), chunk.destination)

    def close(self) -> None:
        """Wait for the last copies and give the buffers back."""
        for wait in self._waits:
            wait()
        self._buffers.clear()
        self._copy.close()
