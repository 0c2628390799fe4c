"""What a decode step computes, operation by operation: traced on the meta device, so that it needs neither weights nor a GPU.

Owns the trace and its folding into layers. An operation is a call of one of our ops (`pegainfer_core.ops`), which fast paths compute with
one or two kernels, or a torch operation outside of them. Knows no family and draws nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pegainfer_core.family import ModelFamily, ModelPlan
from pegainfer_core.kv.storage import StateStorage, allocate
from pegainfer_core.model import BuildContext, ForwardBatch, Model
from pegainfer_core.ops.attention import Attention, AttentionBackend, AttentionMetadata
from pegainfer_core.ops.sampling import greedy
from pegainfer_core.ops.states import States

META = torch.device("meta")
OPS_PACKAGE = "pegainfer_core.ops."
ROWS_READ_BY_INDEX = {"embedding", "index", "index_select", "gather"}
"""Torch operations that read as much of their first argument as they return."""
ROWS_WRITTEN_BY_INDEX = {"index_copy_", "index_put_", "scatter_"}
"""Torch operations that write as much of their first argument as their last tensor holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """A tensor that an operation reads or writes."""

    name: str
    """Of a parameter or buffer in the module; empty for activations."""
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """That the operation touches."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Operation:
    """One operation of the step."""

    index: int
    name: str
    """Of our op ("norm_linear", "RMSNorm"), or of torch's."""
    place: str
    """The innermost module that asked for it."""
    layer: int | None
    """Of the innermost module with a number in its name."""
    reads: list[TensorFacts]
    writes: list[TensorFacts]
    torch_ops: list[str]
    """What the plain path calls."""
    sources: list[int]
    """Indices of the operations whose results it reads."""

    @property
    def weight_bytes(self) -> int:
        """Of parameters and tables read."""
        return sum(tensor.num_bytes for tensor in self.reads if tensor.name)

    @property
    def num_bytes(self) -> int:
        """Read and written."""
        return sum(tensor.num_bytes for tensor in itertools.chain(self.reads, self.writes))

    @property
    def signature(self) -> Any:
        """Equal for operations that do the same in different layers."""
        place = ".".join("*" if word.isdigit() else word for word in self.place.split("."))
        shapes = [(tensor.shape, tensor.dtype) for tensor in itertools.chain(self.reads, self.writes)]
        return self.name, place, tuple(shapes), tuple(self.torch_ops)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Operations that are repeated `count` times; the first time is kept."""

    count: int
    num_layers: int
    """Layers in one repetition; 0 outside of the layers."""
    operations: list[Operation]
    num_bytes: int
    """Of all repetitions."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """A decode step."""

    family: str
    dtype: str
    rows: int
    context: int
    """Tokens of each row, the new one included."""
    operations: list[Operation]
    parts: list[Part]

    @property
    def num_bytes(self) -> int:
        """Memory traffic of the step, if every operation reads its inputs and writes its results once."""
        return sum(operation.num_bytes for operation in self.operations)

    @property
    def weight_bytes(self) -> int:
        """The part that does not depend on rows and context."""
        return sum(operation.weight_bytes for operation in self.operations)


def trace_decode_step(family: ModelFamily, plan: ModelPlan, dtype: str, *, rows: int, context: int) -> StepGraph:
    """Trace one step in which each of `rows` requests gets its `context`-th token."""
    kind: torch.dtype = getattr(torch, dtype)
    with META:
        model = family.build(plan, BuildContext(device=META, dtype=kind, max_model_len=context))
    recorder = _Recorder(model)
    batch = _decode_batch(plan, kind, rows, context, recorder)
    with torch.inference_mode(), recorder:
        logits_NV = model.logits(model(batch))
        ids_N, _ = greedy(logits_NV, plan.vocab_size)
    operations = recorder.finish(ids_N)
    return StepGraph(
        family=family.name, dtype=dtype, rows=rows, context=context, operations=operations, parts=fold(operations)
    )


def _decode_batch(
    plan: ModelPlan, dtype: torch.dtype, rows: int, context: int, recorder: _Recorder, page_size: int = 16
) -> ForwardBatch:
    num_pages = -(-context // page_size)
    ids = torch.empty(rows, dtype=torch.int64, device=META)
    counts = torch.empty(rows + 1, dtype=torch.int32, device=META)
    metadata = AttentionMetadata(
        query_lens=[1] * rows,
        context_lens=[context] * rows,
        query_start_R1=counts,
        context_lens_R=counts[:rows],
        page_table_RP=torch.empty(rows, num_pages, dtype=torch.int32, device=META),
        write_index_T=ids,
        max_query_len=1,
        max_context_len=context,
        num_decode_rows=rows,
    )
    caches = allocate(plan, rows * num_pages + 1, page_size, META, dtype)
    states = States(
        layers=StateStorage(plan, rows, 0, META, dtype).layers,
        slots_R=torch.empty_like(ids),
        fresh_R=counts[:rows],
        query_start_R1=counts,
        query_lens=[1] * rows,
        num_decode_rows=rows,
    )
    attention = Attention(backend=_TracedAttention(recorder), caches=caches, metadata=metadata)
    return ForwardBatch(token_ids_T=ids, positions_T=torch.empty_like(ids), attention=attention, states=states)


class _TracedAttention(AttentionBackend):
    """Tells the recorder what a backend reads."""

    name = "traced"

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def plan(self, metadata: AttentionMetadata) -> None:
        """See AttentionBackend."""

    def run(
        self, q_THD: Tensor, k_cache_PSKD: Tensor, v_cache_PSKD: Tensor, metadata: AttentionMetadata, scale: float
    ) -> Tensor:
        """See AttentionBackend."""
        out_THD = torch.empty_like(q_THD)
        per_token = k_cache_PSKD.shape[2] * k_cache_PSKD.shape[3] * k_cache_PSKD.element_size()
        touched = sum(metadata.context_lens) * per_token
        reads = [(q_THD, _bytes(q_THD)), (k_cache_PSKD, touched), (v_cache_PSKD, touched)]
        self._recorder.record("attention", reads, [(out_THD, _bytes(out_THD))])
        return out_THD


Touched = tuple[Tensor, int]
"""A tensor and how many of its bytes are read or written."""
ViewKey = tuple[int, int, tuple[int, ...]]
"""Storage, offset and shape."""


class _Region:
    """An operation while it is traced."""

    def __init__(self, frame: FrameType | None, name: str, modules: list[str]) -> None:
        self.frame = frame
        self.name = name
        self.modules = modules
        """Names of the modules on the stack, innermost first."""
        self.torch_ops: list[str] = []
        self.reads: dict[ViewKey, Touched] = {}
        """From outside."""
        self.results: dict[ViewKey, Touched] = {}
        """New tensors; what stays inside is dropped in the end."""
        self.changes: dict[ViewKey, Touched] = {}
        """Written in tensors that were there before."""

    def made(self, tensor: Tensor) -> bool:
        """Whether the tensor's memory is a result of this region."""
        return any(key[0] == _storage(tensor) for key in self.results)

    @property
    def layer(self) -> int | None:
        """The innermost number on the stack."""
        numbers = (int(word) for name in self.modules for word in reversed(name.split(".")) if word.isdigit())
        return next(numbers, None)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every torch operation and attributes it to the outermost of our ops on the stack."""

    def __init__(self, model: Model) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = {id(module): name for name, module in model.named_modules()}
        named: Iterable[tuple[str, Tensor]] = itertools.chain(
            model.named_parameters(remove_duplicate=False), model.named_buffers()
        )
        self._names: dict[int, str] = {}
        for name, tensor in named:
            self._names.setdefault(_storage(tensor), name)
        self._regions: list[_Region] = []
        self._kept: list[Any] = []
        """Everything seen, so that no storage's address is used twice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        inputs = [value for value in _flat(args) if isinstance(value, Tensor)]
        outputs = [value for value in _flat([result]) if isinstance(value, Tensor)]
        self._kept.append((inputs, outputs))
        known = {_storage(tensor) for tensor in inputs}
        writes_input = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
        if writes_input:
            target, *values = inputs
            partial = name in ROWS_WRITTEN_BY_INDEX
            num_bytes = _bytes(values[-1]) if partial and values else _bytes(target)
            self.record(name, _read(values), [(target, num_bytes)], changes=True)
        elif name in ROWS_READ_BY_INDEX:
            source, *rest = inputs
            self.record(name, [(source, _bytes(outputs[0])), *_read(rest)], _read(outputs))
        elif not name.startswith(("empty", "new_empty")) and any(_storage(out) not in known for out in outputs):
            self.record(name, _read(inputs), _read(outputs))
        return result  # what is left are views

    def record(self, name: str, reads: Sequence[Touched], writes: Sequence[Touched], *, changes: bool = False) -> None:
        """Take note of one torch operation, where the caller stands. `changes`: it writes in tensors that were there before."""
        frame, modules = self._stand()
        region = self._regions[-1] if self._regions else None
        if region is None or frame is None or region.frame is not frame:
            region = _Region(frame, name if frame is None else _title(frame), modules)
            self._regions.append(region)
        region.torch_ops.append(name)
        for tensor, num_bytes in reads:
            if not region.made(tensor):
                seen = region.reads.get(_key(tensor))
                region.reads[_key(tensor)] = (tensor, max(num_bytes, seen[1] if seen else 0))
        for tensor, num_bytes in writes:
            if not region.made(tensor):
                places = region.changes if changes else region.results
                places[_key(tensor)] = (tensor, num_bytes)

    def _stand(self) -> tuple[FrameType | None, list[str]]:
        """The outermost frame of our ops on the stack, and the names of the modules from there outward."""
        ours: FrameType | None = None
        modules: list[str] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not trace_decode_step.__code__:
            if frame.f_globals.get("__name__", "").startswith(OPS_PACKAGE):
                ours, modules = frame, []
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self._places:
                modules.append(self._places[id(owner)])
            frame = frame.f_back
        return ours, modules

    def finish(self, result: Tensor) -> list[Operation]:
        """The operations, with what passes between them."""
        wanted = {_storage(result)} | {key[0] for region in self._regions for key in region.reads}
        producers: dict[int, int] = {}
        operations: list[Operation] = []
        for index, region in enumerate(self._regions):
            sources = {producers[key[0]] for key in region.reads if key[0] in producers}
            outgoing = {key: touched for key, touched in region.results.items() if key[0] in wanted} | region.changes
            operations.append(
                Operation(
                    index=index,
                    name=region.name,
                    place=region.modules[0] if region.modules else "",
                    layer=region.layer,
                    reads=[self._facts(*touched) for touched in region.reads.values()],
                    writes=[self._facts(*touched) for touched in outgoing.values()],
                    torch_ops=region.torch_ops,
                    sources=sorted(sources),
                )
            )
            producers.update({key[0]: index for key in outgoing})
        return operations

    def _facts(self, tensor: Tensor, num_bytes: int) -> TensorFacts:
        return TensorFacts(
            name=self._names.get(_storage(tensor), ""),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            num_bytes=num_bytes,
        )


def _title(frame: FrameType) -> str:
    """A function's name; that of a method with its class, of a module's forward the class alone."""
    name = frame.f_code.co_name
    owner = frame.f_locals.get("self")
    if owner is None:
        return name
    return type(owner).__name__ if name == "forward" else f"{type(owner).__name__}.{name}"


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _key(tensor: Tensor) -> ViewKey:
    return _storage(tensor), int(tensor.storage_offset()), tuple(tensor.shape)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _read(tensors: Sequence[Tensor]) -> list[Touched]:
    return [(tensor, _bytes(tensor)) for tensor in tensors]


def _flat(values: Iterable[Any]) -> list[Any]:
    """Values, and those in lists among them."""
    found: list[Any] = []
    for value in values:
        found.extend(_flat(value) if isinstance(value, list | tuple) else [value])
    return found


# folding


def fold(operations: Sequence[Operation]) -> list[Part]:
    """Equal layers, and equal sequences of layers, as one part."""
    layers = [list(group) for _, group in itertools.groupby(operations, key=lambda operation: operation.layer)]
    signatures = [tuple(operation.signature for operation in layer) for layer in layers]
    parts: list[Part] = []
    start = 0
    while start < len(layers):
        length, count = _repetition(signatures, start)
        shown = [operation for layer in layers[start : start + length] for operation in layer]
        everything = layers[start : start + length * count]
        parts.append(
            Part(
                count=count,
                num_layers=length if shown[0].layer is not None else 0,
                operations=shown,
                num_bytes=sum(operation.num_bytes for layer in everything for operation in layer),
            )
        )
        start += length * count
    return parts


def _repetition(signatures: Sequence[Any], start: int) -> tuple[int, int]:
    """(length, count) of the repetition at `start` that covers most; the shortest of equals."""
    best = (1, 1)
    for length in range(1, (len(signatures) - start) // 2 + 1):
        pattern = signatures[start : start + length]
        count = 1
        while signatures[start + count * length : start + (count + 1) * length] == pattern:
            count += 1
        if count > 1 and length * count > best[0] * best[1]:
            best = (length, count)
    return best
