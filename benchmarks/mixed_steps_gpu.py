"""What a step costs by its number of tokens: decode rows alone, and beside one chunk of a prompt, on the GPU at hand.

Owns measurement only; the model and the way a step is run are step_gpu.py's. The table says how many prompt tokens should ride beside
decode rows (docs/LOG.md). Writes one JSON file.

    python benchmarks/mixed_steps_gpu.py --out mixed.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from attention_gpu import microseconds
from gpu_spine import provenance
from step_gpu import build, traced

DECODE_ROWS = (0, 1, 8, 16, 32, 64, 128)
TOTALS = (128, 256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1536, 2048, 3072)
CONTEXT = 1024
TRACED = ((1, 1), (8, 8), (32, 32), (8, 256), (32, 512), (128, 1152))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dtype = torch.bfloat16
    result: dict[str, Any] = {"provenance": provenance(), "steps": []}
    with torch.inference_mode():
        step = build("cuda", dtype)
        for decode_rows in DECODE_ROWS:
            times: list[str] = []
            for total in (decode_rows, *TOTALS):
                chunk = total - decode_rows
                if total < 1 or chunk < 0:
                    continue
                # a chunk from the middle of its prompt: half of CONTEXT is there already
                rows = [(1, CONTEXT)] * decode_rows + ([(chunk, chunk + CONTEXT // 2)] if chunk else [])
                step.take(rows, "cuda", dtype)
                row: dict[str, Any] = {"decode_rows": decode_rows, "tokens": total}
                row["us"] = round(microseconds(step.run, 1, 9), 1)
                times.append(f"{total}: {row['us']:.0f}")
                if (decode_rows, total) in TRACED:
                    row["traced"] = traced(step.run)
                result["steps"].append(row)
                options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
                torch.cuda.empty_cache()
            print(f"{decode_rows:4d} rows   " + "  ".join(times), flush=True)
    for row in result["steps"]:
        for name, (count, took) in row.get("traced", {}).get("by_name", {}).items():
            print(
                f"  {row['decode_rows']:4d} {row['tokens']:5d} {took:9.1f} us  {count:4.0f} x  {name[:70]}", flush=True
            )


if __name__ == "__main__":
    main()
