"""Writes deploy/grafana-dashboard.json: `python -m scripts.grafana_dashboard`.

Owns which metrics are shown, and how they are put together in PromQL. Knows nothing of who counts
them (gllm/frontend/metrics.py).
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

DASHBOARD = Path(__file__).parent.parent / "deploy" / "grafana-dashboard.json"
LEFT_OUT = {
    "stage_bubble_share": "since the server's start; the panel has it over time",
    "stage_compilations": "0 once a stage is ready; an alert rather than a panel",
    "rank_busy_seconds": "ranks wait for each other, so those of a stage are equally busy",
    "rank_steps": "equal to the steps of the stage",
    "tensor_parallel_size": "a constant",
    "generation": "1 plus the recoveries since the server's start",
    "stale_frames": "messages that a recovery made void; of use to developers",
    "event_loop_tasks": "follows the open connections; benchmarks/soak.py looks for growth",
    "cache_config_info": "a constant, for routers of other projects",
    "request_inference_time_seconds": "prefill and decode together; the panel has each",
    "request_prompt_tokens": "sizes of requests; of use to autoscalers",
    "request_generation_tokens": "sizes of requests; of use to autoscalers",
    "router_inexact_migrations": "an alert rather than a panel",
    "router_refused_connections": "an alert rather than a panel",
    "router_engine_up": "in the number of engines by state",
    "router_engine_state": "in the number of engines by state",
    "router_engine_running": "requests of the router are shown, not those of all its engines",
    "router_engine_waiting": "as above",
    "router_engine_prefix_cache_queries": "as above",
    "router_engine_prefix_cache_hits": "as above",
    "node_clock_offset_seconds": "a difference of clocks that the step log corrects",
    "router_stale_outputs": "tokens that a migration made void; of use to developers",
}
"""Metrics that are on no panel, and why."""

CHOSEN = 'model_name=~"$model", instance=~"$instance"'
WINDOW = "[$__rate_interval]"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Query(NamedTuple):
    """A line, or several by a label of `legend`."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A chart."""

    title: str
    unit: str
    """As Grafana calls it."""
    queries: list[Query]
    text: str = ""
    """Description shown beside the title."""


def _by(label: str) -> str:
    return f" by ({label})" if label else ""


def gauge(name: str) -> str:
    """Return a gauge, summed over servers."""
    return f"sum (gllm:{name}{{{CHOSEN}}})"


def rate(name: str, by: str = "") -> str:
    """Return a counter per second, summed over servers."""
    return f"sum{_by(by)} (rate(gllm:{name}{{{CHOSEN}}}{WINDOW}))"


def quantile(q: float, name: str) -> str:
    """Return a quantile of a histogram."""
    return f"histogram_quantile({q}, {rate(name + '_bucket', 'le')})"


def mean(name: str) -> str:
    """Return the mean of a histogram's observations."""
    return f"{rate(name + '_sum')} / {rate(name + '_count')}"


def latency(title: str, name: str, text: str) -> Panel:
    """Quantiles of a latency."""
    lines = [Query(quantile(q, name), f"p{100 * q:.0f}") for q in (0.5, 0.9, 0.99)]
    return Panel(title, "s", lines, text)


def each_rate(name: str) -> str:
    """Return a counter per second, of each series."""
    return f"rate(gllm:{name}{{{CHOSEN}}}{WINDOW})"


def of_stages(expression: str) -> list[Query]:
    """Return a line for each stage of each server."""
    return [Query(expression, "{{instance}} stage {{stage}}")]


PANELS = [
    Panel(
        "Requests",
        "short",
        [
            Query(gauge("num_requests_running"), "running"),
            Query(gauge("num_requests_waiting"), "waiting"),
        ],
        "Sequences that hold KV blocks, and those that wait for some.",
    ),
    Panel(
        "Requests that ended",
        "reqps",
        [Query(rate("request_success_total", "finished_reason"), "{{finished_reason}}")],
        "Choices by finish reason.",
    ),
    Panel(
        "Tokens of requests",
        "short",
        [
            Query(rate("prompt_tokens_total"), "prompt tokens/s"),
            Query(rate("generation_tokens_total"), "generated tokens/s"),
        ],
        "Prompts count when their requests come, whatever of them is cached.",
    ),
    latency("Time to first token", "time_to_first_token_seconds", "From arrival."),
    latency("Inter-token latency", "inter_token_latency_seconds", "Between arrivals of tokens."),
    latency("Time per output token", "time_per_output_token_seconds", "Mean of each request."),
    latency("End-to-end latency", "e2e_request_latency_seconds", "From arrival to the last token."),
    Panel(
        "Where requests spend their time",
        "s",
        [
            Query(mean("request_queue_time_seconds"), "queue"),
            Query(mean("request_prefill_time_seconds"), "prefill"),
            Query(mean("request_decode_time_seconds"), "decode"),
        ],
        "Means.",
    ),
    Panel(
        "Objectives met",
        "percentunit",
        [
            Query(
                f'sum by (objective) (rate(gllm:slo_choices_total{{{CHOSEN}, met="true"}}{WINDOW}))'
                f" / {rate('slo_choices_total', 'objective')}",
                "{{objective}}",
            )
        ],
        "Share of the choices with an objective (SLO) that met it.",
    ),
    Panel(
        "KV cache in use",
        "percentunit",
        [Query(f"gllm:kv_cache_usage_perc{{{CHOSEN}}}", "{{instance}}")],
    ),
    Panel(
        "Prefix cache hits",
        "percentunit",
        [
            Query(
                f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}", "hits"
            )
        ],
        "Share of prompt tokens that were found.",
    ),
    Panel(
        "Preemptions",
        "cps",
        [Query(rate("num_preemptions_total", "instance"), "{{instance}}")],
        "Sequences that lost their KV blocks to others, and compute them again.",
    ),
    Panel(
        "Tokens computed",
        "short",
        [
            Query(rate("prefill_tokens_total"), "prefill tokens/s"),
            Query(rate("decode_tokens_total"), "decode tokens/s"),
        ],
    ),
    Panel(
        "Micro-batches",
        "short",
        [
            Query(gauge("micro_batches_in_flight"), "in flight"),
            Query(rate("micro_batches_total"), "committed/s"),
        ],
    ),
    Panel(
        "Tokens of a micro-batch",
        "short",
        [
            Query(quantile(0.5, "iteration_tokens_total"), "p50"),
            Query(quantile(0.99, "iteration_tokens_total"), "p99"),
            Query(mean("iteration_tokens_total"), "mean"),
        ],
        "Prefill and decode together, in buckets of powers of two.",
    ),
    Panel(
        "Stages: busy",
        "percentunit",
        of_stages(each_rate("stage_busy_seconds_total")),
        "Share of time in which a stage computed.",
    ),
    Panel(
        "Stages: bubbles",
        "percentunit",
        of_stages(
            f"{each_rate('stage_bubble_seconds_total')} / on (instance, model_name) group_left "
            f"rate(gllm:pipeline_work_seconds_total{{{CHOSEN}}}{WINDOW})"
        ),
        "Share of the time with work in which a stage was idle though it could have computed.",
    ),
    Panel(
        "Stages: host",
        "s",
        of_stages(f"{each_rate('stage_host_seconds_total')} / {each_rate('stage_steps_total')}"),
        "On GPUs: what the host takes for a step.",
    ),
    Panel(
        "Recoveries",
        "short",
        [
            Query(
                f"sum by (cause) (increase(gllm:recoveries_total{{{CHOSEN}}}{WINDOW}))", "{{cause}}"
            ),
            Query(
                f"sum (increase(gllm:resumed_requests_total{{{CHOSEN}}}{WINDOW}))",
                "requests resumed",
            ),
        ],
        "Worker processes that died and were replaced, and the requests that went on afterwards.",
    ),
    Panel(
        "Duration of recoveries",
        "s",
        [
            Query(mean("recovery_seconds"), "mean"),
            Query(f"gllm:recovering_seconds{{{CHOSEN}}}", "{{instance}} now"),
        ],
        "From a death to the first new step, in which streams pause.",
    ),
    Panel(
        "Trace spans dropped",
        "cps",
        [Query(rate("trace_spans_dropped_total", "reason"), "{{reason}}")],
    ),
]


ROUTER_PANELS = [
    Panel(
        "Engines",
        "short",
        [
            Query(f"sum by (state) (gllm:router_engines{{{CHOSEN}}})", "{{state}}"),
            Query(gauge("router_parked_requests"), "requests that wait for an engine"),
        ],
        "Engines attached to routers, by state. With several routers each counts its own.",
    ),
    Panel(
        "Requests of engines",
        "short",
        [Query(f"sum by (engine) (gllm:router_engine_requests{{{CHOSEN}}})", "{{engine}}")],
    ),
    Panel(
        "Requests sent to engines",
        "reqps",
        [Query(rate("router_dispatched_requests_total", "engine"), "{{engine}}")],
        "Requests that were sent again elsewhere count each time.",
    ),
    Panel(
        "Tokens of engines",
        "short",
        [
            Query(
                f"max by (engine) ({each_rate('router_engine_decode_tokens_total')})",
                "{{engine}}",
            )
        ],
        "Decoded per second, for all routers of an engine.",
    ),
    Panel(
        "KV caches of engines",
        "percentunit",
        [
            Query(
                f"max by (engine) (gllm:router_engine_kv_cache_usage_perc{{{CHOSEN}}})",
                "{{engine}}",
            )
        ],
    ),
    Panel(
        "Weights of engines",
        "percentunit",
        [Query(f"min by (engine) (gllm:router_engine_weight{{{CHOSEN}}})", "{{engine}}")],
        "Below 1 after an engine joined or was slow, 0 while it gets no requests.",
    ),
    Panel(
        "Migrations",
        "cps",
        [Query(rate("router_migrations_total", "cause"), "{{cause}}")],
        "Requests that went on at another engine.",
    ),
    Panel(
        "Engines that left",
        "short",
        [
            Query(
                f"sum by (kind) (increase(gllm:router_lost_engines_total{{{CHOSEN}}}{WINDOW}))",
                "{{kind}}",
            ),
            Query(
                f"sum (increase(gllm:router_refused_engines_total{{{CHOSEN}}}{WINDOW}))", "refused"
            ),
        ],
    ),
    Panel(
        "Requests shed",
        "reqps",
        [Query(rate("router_shed_requests_total", "reason"), "{{reason}}")],
        "Refused because no engine was likely to meet their objective.",
    ),
]
"""Panels below the row of routers."""


def node_load(name: str) -> Query:
    """Return a gauge of each machine: heads and agents report their own."""
    return Query(f"max by (node) (gllm:{name})", "{{node}}")


NODE_PANELS = [
    Panel(
        "Machines",
        "short",
        [
            Query(f"sum by (state) (gllm:nodes{{{CHOSEN}}})", "{{state}}"),
            Query(f"sum (increase(gllm:node_losses_total{{{CHOSEN}}}{WINDOW}))", "losses"),
            Query(
                f"sum (increase(gllm:refused_peers_total{{{CHOSEN}}}{WINDOW}))",
                "refused connections",
            ),
            Query(
                f"sum (increase(gllm:malformed_frames_total{{{CHOSEN}}}{WINDOW}))",
                "malformed frames",
            ),
        ],
        "Machines of engines by state, as the heads see them.",
    ),
    Panel("CPU in use", "percentunit", [node_load("node_cpu_utilization")]),
    Panel(
        "GPUs in use",
        "percentunit",
        [Query("max by (node, gpu) (gllm:node_gpu_utilization)", "{{node}} GPU {{gpu}}")],
    ),
    Panel("Memory available", "bytes", [node_load("node_memory_available_bytes")]),
    Panel("Power", "watt", [node_load("node_power_watts")], "Where the machine shows it."),
    Panel("Temperature", "celsius", [node_load("node_temperature_celsius")]),
    Panel(
        "Bytes between machines",
        "Bps",
        [Query(f"sum by (node, peer) ({each_rate('link_bytes_total')})", "{{node}} with {{peer}}")],
        "Sent and received, as the heads know them from the machines' heartbeats.",
    ),
    Panel(
        "Round trips to machines",
        "s",
        [Query(f"max by (node) (gllm:node_round_trip_seconds{{{CHOSEN}}})", "{{node}}")],
    ),
]
"""Panels below the row of machines."""


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
    for title, group in (("Routers", ROUTER_PANELS), ("Machines", NODE_PANELS)):
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
