"""Writes deploy/grafana-dashboard.json: `python -m scripts.grafana_dashboard`.

Arranges the panels of scripts/grafana_panels.py. The server counts their metrics in
gllm/frontend/metrics.py.
"""

import json
from pathlib import Path
from typing import Any

from scripts.grafana_panels import KV_PANELS, NODE_PANELS, PANELS, ROUTER_PANELS
from scripts.grafana_queries import Panel

DASHBOARD = Path(__file__).parent.parent / "deploy" / "grafana-dashboard.json"
LEFT_OUT = {
    "stage_bubble_share": "since the server's start; the panel has it over time",
    "stage_compilations": "0 once a stage is ready; an alert rather than a panel",
    "rank_busy_seconds": "ranks wait for each other, so those of a stage are equally busy",
    "rank_steps": "equal to the steps of the stage",
    "tensor_parallel_size": "a constant",
    "prefill_batch_tokens": "a setting, or what has been measured for it",
    "kv_push_threshold": "as above",
    "epoch": "1 plus the recoveries since the server's start",
    "stale_frames": "messages that a recovery made void; of use to developers",
    "attached_routers": "of an engine behind routers; an alert rather than a panel",
    "event_loop_tasks": "follows the open connections; benchmarks/soak.py looks for growth",
    "cache_config_info": "a constant, for routers of other projects",
    "request_inference_time_seconds": "prefill and decode together; the panel has each",
    "request_prompt_tokens": "sizes of requests; of use to autoscalers",
    "request_generation_tokens": "sizes of requests; of use to autoscalers",
    "router_inexact_migrations": "an alert rather than a panel",
    "router_rebalancing_seconds": "parts of the moves, whose number is shown",
    "router_refused_connections": "an alert rather than a panel",
    "router_engine_up": "in the number of engines by state",
    "router_engine_state": "in the number of engines by state",
    "router_engine_running": "requests of the router are shown, not those of all its engines",
    "router_engine_waiting": "as above",
    "router_engine_prefix_cache_queries": "as above",
    "router_engine_prefix_cache_hits": "as above",
    "kv_fetched_tokens": "prompt tokens of hand-offs; of use to autoscalers",
    "node_clock_offset_seconds": "a difference of clocks that the step log corrects",
    "emulation_late_seconds": "0 except on emulated devices, where it judges the host",
    "router_stale_outputs": "tokens that a migration made void; of use to developers",
    "resumed_tokens_cached": "of recoveries, whose number and seconds are shown",
    "resumed_tokens_computed": "as above",
    "recovery_phase_seconds": "parts of the recoveries, whose seconds are shown",
    "router_held_requests": "0 without heartbeats and `deferred`; waiting requests are shown",
}
"""Metrics that are on no panel, and why."""

COLUMNS, WIDTH, HEIGHT = 3, 8, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "gllm",
        "title": "gllm",
        "tags": ["gllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }


def text() -> str:
    """Return the file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _variables() -> list[dict[str, Any]]:
    """Return the variables at the top of the page: data source, models and servers."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    made: list[dict[str, Any]] = [source | {"query": "prometheus"}]
    for name, label in (("model", "model_name"), ("instance", "instance")):
        query = f"label_values(gllm:num_requests_running, {label})"
        made.append(
            {
                "name": name,
                "label": name.capitalize(),
                "type": "query",
                "datasource": SOURCE,
                "definition": query,
                "query": {"query": query, "refId": name},
                "refresh": 2,
                "includeAll": True,
                "multi": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return made


def _panels() -> list[dict[str, Any]]:
    """Return the panels of servers, then rows with those of routers and of machines."""
    panels = [_panel(i, panel) for i, panel in enumerate(PANELS)]
    top = -(-len(PANELS) // COLUMNS) * HEIGHT
    for title, group in (
        ("Routers", ROUTER_PANELS),
        ("Machines", NODE_PANELS),
        ("Prefill and decode apart", KV_PANELS),
    ):
        place = {"x": 0, "y": top, "w": COLUMNS * WIDTH, "h": 1}
        row = {"id": len(panels) + 1, "title": title, "type": "row", "collapsed": False}
        panels.append({**row, "gridPos": place, "panels": []})
        first = len(panels)
        panels += [_panel(i, panel, first, top + 1) for i, panel in enumerate(group)]
        top += 1 + -(-len(group) // COLUMNS) * HEIGHT
    return panels


def _panel(number: int, panel: Panel, first: int = 0, top: int = 0) -> dict[str, Any]:
    """Return a panel as JSON values.

    Args:
        number: Place among the panels of its part.
        panel: The panel.
        first: Number of panels before that part.
        top: Height of what is above that part.
    """
    row, column = divmod(number, COLUMNS)
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.unit == "percentunit":
        defaults["max"] = 1
    return {
        "id": first + number + 1,
        "title": panel.title,
        "description": panel.text,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {"x": WIDTH * column, "y": top + HEIGHT * row, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for i, query in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    DASHBOARD.write_text(text(), encoding="utf-8")
