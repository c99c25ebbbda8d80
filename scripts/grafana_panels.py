"""Panels of the Grafana dashboard: the metrics that it shows, by part of the page."""

from scripts.grafana_queries import (
    CHOSEN,
    WINDOW,
    Panel,
    Query,
    each_rate,
    gauge,
    latency,
    mean,
    node_load,
    of_stages,
    quantile,
    rate,
)

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
            Query(gauge("pipeline_depth"), "depth"),
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
"""Panels of servers, at the top of the page."""

ROUTER_PANELS = [
    Panel(
        "Engines",
        "short",
        [
            Query(f"sum by (state) (gllm:router_engines{{{CHOSEN}}})", "{{state}}"),
            Query(gauge("router_parked_requests"), "requests that wait for an engine"),
            Query(f"max (gllm:wanted_engines{{{CHOSEN}}})", "wanted"),
        ],
        "Engines attached to routers, by state, and how many the leading router wants. With "
        "several routers each counts its own.",
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
        "Migrations and copies",
        "cps",
        [
            Query(rate("router_migrations_total", "cause"), "{{cause}}"),
            Query(rate("router_kv_checkpoints_total"), "copies"),
        ],
        "Requests that went on at another engine, and copies of requests' KV blocks.",
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

LINK_LEGEND = "{{node}} to {{peer}}"


def link_value(name: str) -> str:
    """Return a gauge of each sending end of a link."""
    return f"max by (node, peer) (gllm:{name}{{{CHOSEN}}})"


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
        "Rates of links",
        "Bps",
        [Query(link_value("link_bytes_per_second"), LINK_LEGEND)],
        "Payload that a connection between stages carries, as its sending end measures it.",
    ),
    Panel("Round trips of links", "s", [Query(link_value("link_round_trip_seconds"), LINK_LEGEND)]),
    Panel(
        "Bytes that wait for links",
        "bytes",
        [
            Query(link_value("link_queued_bytes"), LINK_LEGEND),
            Query(link_value("link_last_chunk_bytes"), "chunk of " + LINK_LEGEND),
        ],
        "Activations that the link policy holds back, and the size of the last chunk.",
    ),
    Panel(
        "Losses and failures of links",
        "short",
        [
            Query(link_value("link_loss_ratio"), "loss, " + LINK_LEGEND),
            Query(
                f"sum by (node, peer) (increase(gllm:link_failures_total{{{CHOSEN}}}{WINDOW}))",
                "failures, {{node}} to {{peer}}",
            ),
        ],
        "Share of bytes that TCP sends again, and connections that broke.",
    ),
    Panel(
        "Round trips to machines",
        "s",
        [Query(f"max by (node) (gllm:node_round_trip_seconds{{{CHOSEN}}})", "{{node}}")],
    ),
]
"""Panels below the row of machines."""

KV_PANELS = [
    Panel(
        "KV blocks of other engines",
        "none",
        [
            Query(rate("kv_fetches_total", "outcome"), "{{outcome}}"),
            Query(rate("kv_computed_fetches_total"), "computed instead"),
            Query(rate("kv_served_tickets_total"), "served"),
            Query(rate("kv_pushed_tickets_total"), "of these during the prefill"),
        ],
        "Fetches per second by outcome; prompts that were computed in spite of a source, because "
        "the fetch failed or would have taken longer; requests whose blocks others may read, and "
        "those of them that others may read while they are computed.",
    ),
    Panel(
        "Rate of fetches",
        "Bps",
        [
            Query(
                f"{rate('kv_fetched_bytes_total')} / {rate('kv_fetch_seconds_total')}",
                "while a fetch runs",
            ),
            Query(rate("kv_fetched_bytes_total"), "over time"),
        ],
        "Bytes per second of a running fetch, and of all fetches over time.",
    ),
    Panel(
        "Fetches that run, blocks that are held",
        "none",
        [
            Query(gauge("kv_fetches_running"), "sequences that wait"),
            Query(gauge("kv_held_blocks"), "blocks held for others"),
        ],
    ),
]
"""Panels below the row of hand-offs between engines."""
