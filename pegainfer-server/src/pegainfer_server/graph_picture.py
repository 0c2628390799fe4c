"""A decode step as an SVG picture: one box for each operation, repeated layers once.

Owns the drawing. Boxes are in the order of the step; an arrow that skips boxes runs at the left (residual streams), and a bar at the right
says how much of the step's memory traffic an operation causes, in all its repetitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from pegainfer_server.footprint import readable_bytes

if TYPE_CHECKING:
    from pegainfer_core.step_graph import Operation, Part, StepGraph, TensorFacts

LEFT, BOX_WIDTH, BAR_WIDTH, MARGIN = 110, 620, 170, 20
BOX_HEIGHT, GAP, FRAME_PADDING, HEAD_HEIGHT = 76, 16, 26, 74
LANE = 14
"""Distance between two arrows at the left."""
MAX_LENGTH = 82
"""Characters that fit in a box."""
COLOURS = {"weights": ("#e8f0fb", "#3b6fb6"), "cache": ("#fdf0dd", "#c47f17"), "other": ("#f1f1f1", "#777777")}
"""Fill and edge by what dominates an operation's traffic."""
STYLE = """
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #222 }
.name { font-weight: bold; font-size: 13px } .faint { fill: #777 } .title { font-size: 16px; font-weight: bold }
.edge { fill: none; stroke: #555; stroke-width: 1.2; marker-end: url(#tip) }
.frame { fill: none; stroke: #999; stroke-dasharray: 5 4 }
"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Box:
    operation: Operation
    top: int
    count: int

    @property
    def middle(self) -> int:
        return self.top + BOX_HEIGHT // 2


def draw(graph: StepGraph) -> str:
    """The picture, as the text of an SVG file."""
    boxes: dict[int, _Box] = {}
    body: list[str] = []
    top = HEAD_HEIGHT
    for part in graph.parts:
        begun = top
        if part.count > 1:
            top += FRAME_PADDING
        for operation in part.operations:
            boxes[operation.index] = _Box(operation, top, part.count)
            top += BOX_HEIGHT + GAP
        if part.count > 1:
            body += _frame(part, begun, top)
            top += FRAME_PADDING
    body += _edges(boxes, _shown_index(graph))
    for box in boxes.values():
        body += _box(box, graph)
    width, height = LEFT + BOX_WIDTH + BAR_WIDTH + 2 * MARGIN, top + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 L8 4 L0 8 z" fill="#555"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *_head(graph),
            *body,
            "</svg>\n",
        ]
    )


def headline(graph: StepGraph) -> str:
    """What the step is and what it moves, in one line."""
    count = sum(len(part.operations) for part in graph.parts)
    return (
        f"{len(graph.operations)} operations ({count} different ones), {readable_bytes(graph.num_bytes)} a step, "
        f"{readable_bytes(graph.weight_bytes)} of them weights"
    )


def _head(graph: StepGraph) -> list[str]:
    rows = "1 row" if graph.rows == 1 else f"{graph.rows} rows"
    title = f"{graph.family}, one decode step in {graph.dtype}: {rows}, {graph.context} tokens each"
    return [_text(MARGIN, 28, title, "title"), _text(MARGIN, 50, headline(graph), "faint")]


def _frame(part: Part, top: int, bottom: int) -> list[str]:
    noun = "layer" if part.num_layers == 1 else f"{part.num_layers} layers"
    label = f"{noun} x {part.count}, {readable_bytes(part.num_bytes)} in all"
    left, width = LEFT - 16, BOX_WIDTH + BAR_WIDTH + 32
    return [
        f'<rect class="frame" x="{left}" y="{top}" width="{width}" height="{bottom - top + 6}" rx="10"/>',
        _text(LEFT + BOX_WIDTH, top + 17, label, "name", "end"),
    ]


def _shown_index(graph: StepGraph) -> dict[int, int]:
    """Index of every operation -> index of the box that stands for it."""
    shown: dict[int, int] = {}
    for part in graph.parts:
        first, length = part.operations[0].index, len(part.operations)
        for offset in range(length * part.count):
            shown[first + offset] = first + offset % length
    return shown


def _edges(boxes: dict[int, _Box], shown: dict[int, int]) -> list[str]:
    """Straight arrows between neighbours; the others in lanes at the left, inner lanes for the shorter ones."""
    order = {index: place for place, index in enumerate(boxes)}
    lines: list[str] = []
    for index, box in boxes.items():
        for source in box.operation.sources:
            origin = boxes[shown[source]]
            skipped = order[index] - order[shown[source]]
            if skipped == 1:
                x = LEFT + 40
                lines.append(f'<path class="edge" d="M{x} {origin.top + BOX_HEIGHT} L{x} {box.top}"/>')
            else:
                x = LEFT - 16 - LANE * min(skipped - 1, 6)
                start, end = origin.middle + 6, box.middle - 6
                lines.append(f'<path class="edge" d="M{LEFT} {start} H{x} V{end} H{LEFT}"/>')
    return lines


def _box(box: _Box, graph: StepGraph) -> list[str]:
    operation = box.operation
    fill, edge = COLOURS[_kind(operation)]
    weights = [tensor for tensor in operation.reads if tensor.name]
    inputs = [tensor for tensor in operation.reads if not tensor.name]
    share = box.count * operation.num_bytes / graph.num_bytes
    traffic = f"{readable_bytes(operation.num_bytes)}, {100 * share:.1f} %"
    length = 1 + share * (BAR_WIDTH - 20)
    x, y = LEFT, box.top
    return [
        "<g>",
        f"<title>{escape(', '.join(operation.torch_ops))}</title>",
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{fill}" stroke="{edge}"/>',
        _text(x + 10, y + 18, operation.name, "name"),
        _text(x + BOX_WIDTH - 10, y + 18, operation.place, "faint", "end"),
        _text(x + 10, y + 35, _shapes(inputs, graph.dtype)),
        _text(x + 10, y + 51, f"-> {_shapes(operation.writes, graph.dtype)}"),
        _text(x + 10, y + 67, _shapes(weights, graph.dtype), "faint"),
        f'<rect x="{x + BOX_WIDTH + 8}" y="{y + 38}" width="{length:.1f}" height="12" fill="{edge}"/>',
        _text(x + BOX_WIDTH + 8, y + 32, traffic),
        "</g>",
    ]


def _kind(operation: Operation) -> str:
    """What most of the traffic is."""
    if 2 * operation.weight_bytes >= operation.num_bytes:
        return "weights"
    return "cache" if operation.name.startswith(("Attention.", "rotate_and_store")) else "other"


def _shapes(tensors: Sequence[TensorFacts], dtype: str) -> str:
    """For example "[1, 9, 32] x 2, int64 [1]": parameters by name, types where they are not the step's."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        words = [_short(tensor.name), "" if tensor.dtype == dtype else tensor.dtype, str(list(tensor.shape))]
        text = " ".join(word for word in words if word)
        counts[text] = counts.get(text, 0) + 1
    texts = [text if count == 1 else f"{text} x {count}" for text, count in counts.items()]
    line = ", ".join(texts)
    return line if len(line) <= MAX_LENGTH else line[: MAX_LENGTH - 4] + " ..."


def _short(name: str) -> str:
    """A parameter's last word, without "weight"."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _text(x: int, y: int, text: str, style: str = "", anchor: str = "start") -> str:
    extra = (f' class="{style}"' if style else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text x="{x}" y="{y}"{extra}>{escape(text)}</text>'
