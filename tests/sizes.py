"""Reports the sizes of files and functions, so that they stay visible. Enforces nothing; `make lint` prints it.

Kernels and tables are naturally longer. As a gauge: files about 200 lines at the 90th percentile, functions about 30.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 5


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and place of every function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def report(title: str, sizes: list[tuple[int, str]]) -> list[str]:
    """Percentiles, and the longest few."""
    cuts = quantiles([size for size, _ in sizes], n=10)
    longest = sorted(sizes, reverse=True)[:SHOWN]
    head = f"{title}: {len(sizes)}, lines at the median {cuts[4]:.0f}, at p90 {cuts[8]:.0f}, longest {longest[0][0]}"
    return [head, *(f"  {size:5d} {name}" for size, name in longest)]


def main() -> int:
    """Print the report of all packages' sources."""
    folders = [*ROOT.glob("pegainfer-*/src"), *ROOT.glob("examples/*/src")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    files = [(len(path.read_text(encoding="utf-8").splitlines()), str(path.relative_to(ROOT))) for path in paths]
    lines = report("files", files) + report("functions", [size for path in paths for size in functions(path)])
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
