"""What the resident memory of processes is made of (Linux): goal P6.

    python benchmarks/memory_map.py PID...        a running server's processes, or `--children PID` for a whole tree

Groups the mappings of /proc/PID/smaps: code and data of each package's libraries, the C heap, other anonymous memory (Python's
objects, thread stacks, buffers), and memory of the GPU's driver.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import psutil

HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ \d+\s*(.*)$")
PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/]+)(?:/([^/]+))?")
COUNTED = ("Rss", "Pss", "Private_Dirty", "AnonHugePages", "Locked")


def group_of(name: str) -> str:
    """Where a mapping belongs."""
    if not name:
        return "anonymous"
    if name.startswith(("/dev/nvidia", "anon_inode:[nvidia", "/dev/zero")):
        return "GPU driver's mappings"
    if name.startswith(("/dev/shm", "/memfd")):
        return "shared memory"
    package = PACKAGE.search(name)
    if package:
        # the parts of CUDA are packages of one folder
        return f"nvidia/{package[2]}" if package[1] == "nvidia" else package[1].removesuffix(".libs")
    if name.startswith("["):
        return name
    return "GPU driver's libraries" if "libcuda" in name or "libnvidia" in name else "Python and the system"


def mapped(pid: int) -> dict[str, Counter[str]]:
    """KiB of each group: see COUNTED."""
    groups: dict[str, Counter[str]] = {}
    group: Counter[str] = Counter()
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8").splitlines():
        header = HEADER.match(line)
        if header:
            group = groups.setdefault(group_of(header[2].strip()), Counter())
            continue
        key, _, value = line.partition(":")
        if key in COUNTED:
            group[key] += int(value.split()[0])
    return groups


def main() -> None:
    """Print one table for each process, and everything as JSON in the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pids", type=int, nargs="+")
    parser.add_argument("--children", action="store_true", help="and all processes below these")
    arguments = parser.parse_args()
    processes = [psutil.Process(pid) for pid in arguments.pids]
    if arguments.children:
        processes += [child for process in processes for child in process.children(recursive=True)]
    result = []
    for process in processes:
        groups = {name: sizes for name, sizes in mapped(process.pid).items() if sizes["Rss"]}
        total = sum(groups.values(), Counter())
        print(f"{' '.join(process.cmdline())[:100]}: {process.num_threads()} threads, MiB")
        print(f"{'':28}" + "".join(f"{name:>14}" for name in COUNTED))
        for name, sizes in [*sorted(groups.items(), key=lambda item: -item[1]["Rss"]), ("total", total)]:
            print(f"{name[:28]:28}" + "".join(f"{sizes[key] / 1024:14.1f}" for key in COUNTED))
        mib = {name: {key: round(value / 1024, 1) for key, value in sizes.items()} for name, sizes in groups.items()}
        result.append({"threads": process.num_threads(), "mib": mib})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
