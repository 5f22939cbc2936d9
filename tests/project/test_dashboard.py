"""The Grafana dashboard asks for the metrics that the project exports, and for all of them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from fl_dispatch.hosting.records.metrics import RunCollector

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana.json").read_text(encoding="utf-8"))


def exported() -> set[str]:
    """The names in ``/metrics``, where a counter's ends in ``_total``; importing those of P2P needs vLLM."""
    ours = {metric.name + ("_total" if metric.type == "counter" else "") for metric in RunCollector().describe()}
    tree = ast.parse((ROOT / "src/fl_transfer/p2p/counts.py").read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NAMES"
    )
    return ours | {f"vllm:fl_p2p_{name}_total" for name in names}


def test_the_dashboard_asks_for_every_metric_that_is_exported_and_for_no_other() -> None:
    asked = re.findall(r"\b(?:vllm:)?fl_\w+", json.dumps(DASHBOARD))
    assert set(asked) == exported()


def test_no_two_panels_lie_on_each_other() -> None:
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in DASHBOARD["panels"]]
    cells = [(x + dx, y + dy) for x, y, w, h in places for dx in range(w) for dy in range(h)]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
