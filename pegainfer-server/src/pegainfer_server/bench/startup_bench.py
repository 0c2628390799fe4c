"""Starts of a server: time to ready, memory idle and after load, time to stop.

Owns the order of one start and the state of the page cache before it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pegainfer_server.bench import engine_facts
from pegainfer_server.bench.client import Endpoint
from pegainfer_server.bench.load import run_point
from pegainfer_server.bench.report import Columns, load_figures
from pegainfer_server.bench.server_process import ServerProcess, evict, fetch
from pegainfer_server.bench.workload import Point

PageCache = Literal["as-is", "cold", "warm"]
SETTLE_SECONDS = 1.0
"""Between ready and the look at idle memory."""

STARTUP_COLUMNS: Columns = (
    ("engine", "engine"),
    ("page cache", "page_cache"),
    ("answers s", "answers_s"),
    ("ready s", "ready_s"),
    ("RSS idle MiB", "idle.rss_mib"),
    ("loaded", "loaded.rss_mib"),
    ("PSS loaded", "loaded.pss_mib"),
    ("GPU MiB", "loaded.gpu_mib"),
    ("processes", "idle.processes"),
    ("stop s", "stop_s"),
)


def run_start(
    name: str,
    command: Sequence[str],
    url: str,
    *,
    model: str | None = None,
    page_cache: PageCache = "as-is",
    files: Sequence[Path] = (),
    load: Point | None = None,
    token_ids: range = range(0),
    timeout: float = 600.0,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Figures of one start; with `load`, that is run before the second look at memory. Raises PegainferError."""
    cached_bytes = 0
    if page_cache != "as-is":
        cached_bytes = evict(files) if page_cache == "cold" else fetch(files)
    root = Endpoint(name, url, "").root
    with ServerProcess(command, root, environment) as server:
        row: dict[str, Any] = {"engine": name, "page_cache": page_cache, "page_cache_bytes": cached_bytes}
        row |= server.wait_ready(timeout)
        time.sleep(SETTLE_SECONDS)
        row["idle"] = server.memory()
        endpoint = Endpoint(name, url, model or engine_facts.only_model(url))
        row["engine_facts"] = engine_facts.ask(endpoint)
        if load is not None:
            row["load"] = load_figures(name, load, run_point(endpoint, load, token_ids))
            row["loaded"] = server.memory()
        return row | server.stop()
