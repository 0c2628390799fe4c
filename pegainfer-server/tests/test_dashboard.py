"""The Grafana dashboard asks for nothing that /metrics does not have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pegainfer_core.messages import EngineStats, StepOutputs

DASHBOARD = Path(__file__).resolve().parent.parent.parent / "docs" / "dashboards" / "grafana.json"
NAME = re.compile(r"\b(?:vllm:|pegainfer:|http_)\w+")
LABELS = re.compile(r"(?:by \(([\w, ]+)\))|\{(\w+)=~|\{\{(\w+)\}\}")


@pytest.fixture
def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return board


async def metrics(served: Any) -> str:
    """/metrics after traffic of every kind that feeds a family."""
    await served.complete(prompt="Hello, you there", ignore_eos=True)
    served.engine.dispatch(StepOutputs([], EngineStats(), 5, (0.1, 0.2, 0.3)))
    text: str = (await served.http.get("/metrics")).text
    return text


async def test_every_metric_and_label_of_the_dashboard_exists(served: Any, dashboard: dict[str, Any]) -> None:
    text = await metrics(served)
    samples = {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")}
    labels = set(re.findall(r'(\w+)="', text))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"]]
    legends = [target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in NAME.findall(query)}
    assert len(asked) > 15
    assert asked - samples == set()
    used = {
        label.strip()
        for text in (*queries, *legends)
        for found in LABELS.findall(text)
        for label in "".join(found).split(",")
    }
    assert {"model_name", "le", "act", "handler"} <= used
    assert used - labels == set()


def test_the_dashboard_can_be_imported(dashboard: dict[str, Any]) -> None:
    """Ids are unique, panels do not overlap, and the data source is asked for at import."""
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["gridPos"]["w"] == panel["gridPos"]["h"] == 8 for panel in panels)
    (source,) = dashboard["__inputs"]
    sources = [panel["datasource"] for panel in panels] + [
        t["datasource"] for panel in panels for t in panel["targets"]
    ]
    assert {item["uid"] for item in sources} == {f"${{{source['name']}}}"}
