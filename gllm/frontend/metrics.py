"""Prometheus metrics of the server: counters of requests, and the engine's own at each scrape."""

import asyncio
import math
import re
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import (
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gllm.engine.interface import EngineInterface, EngineStatus
from gllm.frontend.node_metrics import PREFIX, NodeCollector, counter, gauge
from gllm.frontend.router_metrics import RouterCollector
from gllm.recovery.phase_times import RecoveryPhase
from gllm.scheduler.plan import SchedulerStats

VLLM_PREFIX = "vllm:"
"""Prefix of the names under which some metrics are repeated for routers, autoscalers and
dashboards that read vLLM's; docs/router.md has the table."""
SAME_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "iteration_tokens_total",
    "request_success",
    "request_prompt_tokens",
    "request_generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
)
"""Metrics that have the same name after either prefix."""
ALIASES: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in SAME_NAMES},
    # Names of earlier releases, which production-stack and SMG still read.
    "kv_cache_usage_perc": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    # vLLM's time per output token is that between tokens; the mean of a request has its own name.
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds",),
}
"""Names after vLLM's prefix by the name after gllm's."""


_BLOCK = re.compile(r"^# HELP gllm:(\w+) .*\n(?:(?!# HELP ).*\n)*", re.MULTILINE)
"""A metric in Prometheus's text format: its comments and its samples."""


def repeat_with_aliases(text: str) -> str:
    """Return copies of gllm's metrics under vLLM's metric names, in Prometheus's text format.

    Args:
        text: All metrics of gllm in Prometheus's text format. Text is copied because formatting the
            samples again would take as long as formatting all metrics.
    """
    parts = []
    for block in _BLOCK.finditer(text):
        name = block[1] if block[1] in ALIASES else block[1].removesuffix("_total")
        for alias in ALIASES.get(name, ()):
            # Label values may contain anything, so only the beginnings of lines are changed.
            pattern = rf"^(# (?:HELP|TYPE) )?{PREFIX}{name}"
            alias = rf"\g<1>{VLLM_PREFIX}{alias}"
            parts.append(re.sub(pattern, alias, block[0], flags=re.MULTILINE))
    return "".join(parts)


def adapter_metric(model: str) -> Metric:
    """Return vLLM's metric `lora_requests_info`, with no LoRA adapters.

    llm-d selects servers by it.
    """
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters", "model_name")
    text = "LoRA adapters in use; the value is the time of the scrape"
    family = GaugeMetricFamily(VLLM_PREFIX + "lora_requests_info", text, labels=labels)
    family.add_metric(["0", "", "", model], time.time())
    return family


def num_event_loop_tasks() -> int:
    """Return the number of asyncio tasks; 0 if this thread has no running event loop."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


def kv_transfer_metrics(labels: dict[str, str], status: EngineStatus) -> Iterator[Metric]:
    """Yield Prometheus metrics of an engine's KV cache transfers; none if transfers are disabled.

    Args:
        labels: Labels of all samples, by name.
        status: Status of the engine, with the counters of its transfers.
    """
    stats, totals = status.stats, status.kv_transfers
    if totals is None:
        return
    text = "Fetches of KV blocks from other engines that have ended, by outcome"
    outcomes = [(("complete",), totals.num_fetched), (("failed",), totals.num_failed)]
    yield counter("kv_fetches", text, labels, outcomes, "outcome")
    for name, value, text in (
        ("kv_fetched_bytes", totals.num_bytes, "Bytes of KV blocks that fetches have got"),
        ("kv_fetch_seconds", totals.seconds, "Seconds of the complete fetches"),
        ("kv_fetched_tokens", stats.fetched_tokens,
         "Tokens that were not computed because another engine had their KV blocks"),
        ("kv_computed_fetches", stats.failed_fetches,
         "Requests whose prompt was computed in spite of a source: the fetch has failed, or was "
         "predicted to take longer"),
        ("kv_served_tickets", totals.num_served,
         "Requests whose KV blocks other engines were allowed to read"),
        ("kv_pushed_tickets", totals.num_pushed,
         "Those of them whose KV blocks could be read while their prompt was computed"),
    ):  # fmt: skip
        yield counter(name, text, labels, value)
    for name, value, text in (
        ("kv_fetches_running", stats.fetching, "Sequences that wait for KV blocks"),
        ("kv_held_blocks", stats.held_blocks, "KV blocks that are kept for other engines"),
    ):
        yield gauge(name, text, labels, value)


def kv_disk_metrics(labels: dict[str, str], status: EngineStatus) -> Iterator[Metric]:
    """Yield Prometheus metrics of an engine's disk tier; none without one.

    Args:
        labels: Labels of all samples, by name.
        status: Status of the engine, with the counters of the tier.
    """
    totals = status.kv_disk
    if totals is None:
        return
    text = "Reads of KV blocks from disk for a request, by outcome"
    outcomes = [(("complete",), totals.num_loads), (("failed",), totals.num_failed_loads)]
    yield counter("kv_disk_loads", text, labels, outcomes, "outcome")
    for name, value, text in (
        ("external_prefix_cache_queries", totals.num_queried_tokens,
         "Prompt tokens beyond those in memory that were looked up on disk"),
        ("external_prefix_cache_hits", totals.num_hit_tokens,
         "Prompt tokens whose KV blocks were read from disk"),
        ("kv_disk_read_bytes", totals.num_read_bytes, "Bytes of KV blocks read from disk"),
        ("kv_disk_read_seconds", totals.read_seconds, "Seconds of the complete reads"),
        ("kv_disk_stored_blocks", totals.num_stored_blocks, "KV blocks written to disk"),
        ("kv_disk_dropped_blocks", totals.num_dropped_blocks,
         "KV blocks that left memory before they were written, because the disk was too slow"),
        ("kv_disk_evicted_blocks", totals.num_evicted_blocks,
         "KV blocks removed from disk to make space"),
    ):  # fmt: skip
        yield counter(name, text, labels, value)
    yield gauge("kv_disk_blocks", "KV blocks that can be read from disk", labels,
                totals.num_kept_blocks)  # fmt: skip


def length_metrics(labels: dict[str, str], status: EngineStatus) -> Iterator[Metric]:
    """Yield Prometheus metrics of the predictor of output lengths; none without one.

    Args:
        labels: Labels of all samples, by name.
        status: Status of the engine or router, with the accuracy of its predictor.
    """
    if not status.length_predictor:
        return
    text = "Predictor of output lengths, as a label; the value is 1"
    name = [((status.length_predictor,), 1)]
    yield gauge("length_predictor_info", text, labels, name, "predictor")
    text = (
        "Outputs that have ended, by bucket of their length in tokens; predicted when the request "
        "arrived to be in it (right), or in one of shorter or of longer outputs"
    )
    samples = [
        ((row.bucket, result), count)
        for row in status.output_lengths
        for result, count in (
            ("right", row.num_right), ("short", row.num_short), ("long", row.num_long),
        )
    ]  # fmt: skip
    yield counter("length_predictions", text, labels, samples, "bucket result")


def speculation_metrics(labels: dict[str, str], stats: SchedulerStats) -> Iterator[Metric]:
    """Yield Prometheus metrics of an engine's guesses; none without speculation.

    Args:
        labels: Labels of all samples, by name.
        stats: Statistics of the engine's scheduler.
    """
    if not stats.accepted_per_position:
        return
    for name, value, text in (
        ("spec_decode_num_drafts", stats.drafts, "Windows of guessed tokens"),
        ("spec_decode_num_draft_tokens", stats.draft_tokens, "Guessed tokens in these windows"),
        ("spec_decode_num_accepted_tokens", stats.accepted_tokens, "Guesses that were right"),
    ):
        yield counter(name, text, labels, value)
    text = "Guesses that were right, by position in the window, from 0"
    counts = [((str(i),), count) for i, count in enumerate(stats.accepted_per_position)]
    yield counter("spec_decode_num_accepted_tokens_per_pos", text, labels, counts, "position")


FAST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
"""Bucket bounds of latencies per token, in seconds."""
SLOW_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
    *(5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
"""Bucket bounds of latencies of whole requests, in seconds."""
STEP_TOKEN_BUCKETS = tuple(2**exponent for exponent in range(15))
"""Bucket bounds of micro-batch sizes, 1..16384 tokens."""
TOKEN_BUCKETS = tuple(float(digit * 10**exponent) for exponent in range(6) for digit in (1, 2, 5))
"""Bucket bounds of the tokens of requests, 1..500000."""
FINISH_REASONS = ("stop", "length", "abort", "error")
"""Values of the label `finished_reason`."""
LABELS = ("model_name",)
"""Labels of all metrics."""
OBJECTIVES = ("ttft", "tpot")
"""Values of the label `objective`."""
RECOVERY_CAUSES = (
    *("killed", "failed", "frozen", "lost", "rebalanced", "drained", "joined"),
    *("node", "link"),
)
"""Values of the label `cause` of recoveries."""
SPAN_DROP_REASONS = ("queue_full", "export_failed")
"""Values of the label `reason` of dropped spans."""

GAUGES = {
    "num_requests_running": ("running", "Sequences that hold KV blocks"),
    "num_requests_waiting": ("waiting", "Sequences that wait for KV blocks"),
    "kv_cache_usage_perc": ("kv_usage", "Share of KV blocks in use, 0 to 1"),
    "pipeline_depth": (
        "depth",
        "Micro-batches that are to be in flight (B): the decodes are spread over them",
    ),
    "micro_batches_in_flight": ("in_flight", "Micro-batches on their way through the pipeline"),
    "prefill_batch_tokens": (
        "prefill_batch_tokens",
        "Prompt tokens per micro-batch that the policy aims at; 0 with one that has no such number",
    ),
    "kv_push_threshold": (
        "kv_push_threshold",
        "Prompt tokens from which on KV is transferred during the prefill; 0 without --kv-push",
    ),
}
"""Gauges: field of the scheduler's statistics and help text, by name."""
COUNTERS = {
    "micro_batches": ("steps", "Micro-batches committed"),
    "num_preemptions": ("preemptions", "Sequences that lost their KV blocks to others"),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache"),
    "prefill_tokens": ("prefill_tokens", "Prompt tokens computed"),
    "decode_tokens": ("decode_tokens", "Tokens computed in decode"),
    "resumed_tokens_cached": (
        "resumed_cached_tokens",
        "Tokens of resumed sequences whose KV blocks were kept",
    ),
    "resumed_tokens_computed": (
        "resumed_computed_tokens",
        "Tokens of resumed sequences that were computed again",
    ),
}
"""Counters: field of the scheduler's statistics and help text, by name."""
STAGE_COUNTERS = {
    "stage_steps": ("num_steps", "Micro-batches computed by a stage"),
    "stage_busy_seconds": (
        "busy_seconds",
        "Seconds a stage spent computing its steps. On a CPU: in layers and logits. On a GPU: by "
        "the GPU's clock, from begin to end of each step's graph, or of its layers where there is "
        "no graph, and of its sampling; the time in which the host puts a graph's inputs into the "
        "GPU's queue, and waits for activations, tokens and grammars, are left out; gaps between "
        "the kernels of a step without a graph are not",
    ),
    "stage_host_seconds": (
        "host_seconds",
        "Seconds a stage's host took to build steps and put them into its GPU's queues",
    ),
    "stage_compilations": ("num_compilations", "GPU kernels compiled since a stage is ready"),
    "emulation_late_seconds": (
        "late_seconds",
        "Seconds after the ends of an emulated stage's steps until its worker noticed them; "
        "divided by stage_steps, the mean lateness of a step",
    ),
}
"""Counters per stage, of its rank 0: field of StageUtilization and help text, by name."""
RANK_COUNTERS = {
    "rank_steps": ("num_steps", "Micro-batches computed by a rank of a stage"),
    "rank_busy_seconds": (
        "busy_seconds",
        "Seconds a rank of a stage spent computing its steps, sums over the ranks included",
    ),
}
"""Counters per rank of stages with several: field of StageUtilization and help text, by name."""


def histogram_metric(
    name: str, text: str, model: str, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Metric:
    """Return a Prometheus histogram with a sample for every bucket, also for empty ones.

    Prometheus reads a series that appears later as an increase from 0.

    Args:
        name: Name of the metric without the prefix PREFIX.
        text: Help text.
        model: Name of the served model.
        bounds: Upper bounds of the buckets.
        counts: Number of values up to each bound, then of all values.
        total: Sum of the values.
    """
    family = HistogramMetricFamily(PREFIX + name, text, labels=LABELS)
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    family.add_metric([model], list(zip(names, map(float, counts), strict=True)), total)
    return family


class EngineCollector(Collector):
    """Prometheus collector of an engine's gauges and counters, read at each scrape."""

    def __init__(self, engine: EngineInterface) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield metrics of the engine's scheduler, pipeline stages, KV transfers and recoveries."""
        model = {"model_name": self._engine.model.name}
        status = self._engine.status()
        stats = status.stats._asdict()
        for name, (key, text) in GAUGES.items():
            yield gauge(name, text, model, stats[key])
        for name, (key, text) in COUNTERS.items():
            yield counter(name, text, model, stats[key])
        # vLLM's metric has the size as labels, too.
        text = "Size of the KV cache, as labels; the value is 1"
        size = (str(status.block_size), str(status.num_kv_blocks))
        yield gauge("cache_config_info", text, model, [(size, 1)], "block_size num_gpu_blocks")
        if status.stats.state_slots:
            text = "Slots for the states of recurrent layers"
            yield gauge("state_slots_total", text, model, status.stats.state_slots)
            text = "State slots that running sequences use; checkpoints are not counted"
            yield gauge("state_slots_used", text, model, status.stats.used_state_slots)
        yield self._step_sizes(self._engine.model.name, status)
        yield from self._stages(model, status)
        yield from self._recoveries(model, status)
        if status.num_routers is not None:
            text = "Routers that have attached this engine"
            yield gauge("attached_routers", text, model, status.num_routers)
        yield from kv_transfer_metrics(model, status)
        yield from kv_disk_metrics(model, status)
        yield from speculation_metrics(model, status.stats)
        yield from length_metrics(model, status)
        yield adapter_metric(self._engine.model.name)
        text = "Tasks of the event loop: one per open connection, and those of the server itself"
        yield gauge("event_loop_tasks", text, model, num_event_loop_tasks())

    def _step_sizes(self, model: str, status: EngineStatus) -> Metric:
        """Return tokens per micro-batch as a histogram."""
        text = "Tokens of a micro-batch, prefill and decode together"
        counts = [
            sum(count for size, count in status.step_sizes.items() if size <= bound)
            for bound in (*STEP_TOKEN_BUCKETS, math.inf)
        ]
        total = status.stats.prefill_tokens + status.stats.decode_tokens
        return histogram_metric(
            "iteration_tokens_total", text, model, STEP_TOKEN_BUCKETS, counts, total
        )

    def _stages(self, model: dict[str, str], status: EngineStatus) -> Iterator[Metric]:
        bubbles = status.bubbles
        for name, (key, text) in STAGE_COUNTERS.items():
            loads = sorted(status.stage_loads.items())
            values = [((str(stage),), getattr(load, key)) for stage, load in loads]
            yield counter(name, text, model, values, "stage")
        text = "Seconds in which there was work for at least one stage"
        yield counter("pipeline_work_seconds", text, model, bubbles.work_seconds)
        text = "Seconds a stage was idle though the work at hand could have kept it busy"
        lost = [((str(stage),), seconds) for stage, seconds in enumerate(bubbles.seconds)]
        yield counter("stage_bubble_seconds", text, model, lost, "stage")
        text = "stage_bubble_seconds over pipeline_work_seconds since the start, 0 to 1"
        shares = [(stage, seconds / (bubbles.work_seconds or 1.0)) for stage, seconds in lost]
        yield gauge("stage_bubble_share", text, model, shares, "stage")
        text = "Ranks that compute a stage together (tensor parallelism)"
        num_ranks = Counter(stage for stage, _ in status.rank_loads)
        sizes = [((str(stage),), count) for stage, count in sorted(num_ranks.items())]
        yield gauge("tensor_parallel_size", text, model, sizes, "stage")
        for name, (key, text) in RANK_COUNTERS.items():
            rank_values = [
                ((str(stage), str(rank)), getattr(load, key))
                for (stage, rank), load in sorted(status.rank_loads.items())
                if num_ranks[stage] > 1
            ]
            yield counter(name, text, model, rank_values, "stage rank")

    def _recoveries(self, model: dict[str, str], status: EngineStatus) -> Iterator[Metric]:
        text = "Recoveries from the death of a worker process, by its cause"
        causes = sorted({*RECOVERY_CAUSES, *status.recoveries})
        counts = [((cause,), status.recoveries.get(cause, 0)) for cause in causes]
        yield counter("recoveries", text, model, counts, "cause")
        text = "Duration of recoveries, from a death to the first new step"
        seconds = status.recovery_seconds
        numbers = [sum(each <= bound for each in seconds) for bound in (*SLOW_BUCKETS, math.inf)]
        yield histogram_metric(
            "recovery_seconds", text, model["model_name"], SLOW_BUCKETS, numbers, sum(seconds)
        )
        text = "Seconds of these recoveries, by phase: what the engine waited for"
        phases = [
            ((str(phase),), status.recovery_phase_seconds.get(phase, 0.0))
            for phase in RecoveryPhase
        ]
        yield counter("recovery_phase_seconds", text, model, phases, "phase")
        text = "Requests submitted again after a recovery, each time counted"
        yield counter("resumed_requests", text, model, status.num_resumed_requests)
        text = "Messages of earlier epochs that arrived late and were dropped"
        yield counter("stale_frames", text, model, status.num_stale_frames)
        text = "Starts of the pipeline: 1 plus its recoveries"
        yield gauge("epoch", text, model, status.epoch)
        since = status.recovering_since
        text = "Seconds since the running recovery began; 0 if none runs"
        value = 0.0 if since is None else time.monotonic() - since
        yield gauge("recovering_seconds", text, model, value)


class TokenCounters(Collector):
    """Prometheus collector of generated tokens and inter-token latencies, updated at every token.

    Counts in plain numbers, because the counters of prometheus_client are slower.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self.num_tokens = 0
        self._gaps = [0] * (len(FAST_BUCKETS) + 1)
        """Number of inter-token latencies per bucket of FAST_BUCKETS, and above the last."""
        self._gap_seconds = 0.0

    def observe_gap(self, seconds: float) -> None:
        """Count an inter-token latency."""
        self._gaps[bisect_left(FAST_BUCKETS, seconds)] += 1
        self._gap_seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the number of generated tokens and the inter-token latencies."""
        model = {"model_name": self._model}
        yield counter("generation_tokens", "Tokens generated", model, self.num_tokens)
        yield histogram_metric(
            "inter_token_latency_seconds", "Time between tokens", self._model, FAST_BUCKETS,
            list(accumulate(self._gaps)), self._gap_seconds,
        )  # fmt: skip


class LabeledCounter:
    """Prometheus counter with further labels than the model's name.

    Args:
        registry: Registry of the server's metrics.
        model: Name of the served model.
        name: Name of the metric without the prefix PREFIX.
        text: Help text.
        labels: Names of the labels, separated by spaces.
        series: Combinations of label values that are exported as 0 from the start.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model: str,
        name: str,
        text: str,
        labels: str,
        series: Iterable[tuple[str, ...]],
    ) -> None:
        names = (*LABELS, *labels.split())
        self._model = model
        self._counter = PrometheusCounter(PREFIX + name, text, names, registry=registry)
        for values in series:
            self._counter.labels(model, *values)

    def count(self, *values: str, amount: int = 1) -> None:
        """Add `amount` to the series with these label values. Thread-safe."""
        self._counter.labels(self._model, *values).inc(amount)


class Metrics:
    """All Prometheus metrics of one server: registry, latency histograms and request counters."""

    def __init__(self, engine: EngineInterface) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine))
        if engine.fleet is not None:
            self.registry.register(RouterCollector(engine.fleet, engine.model.name))
        else:
            self.registry.register(NodeCollector(engine))
        model = engine.model.name

        def add_histogram(
            name: str, text: str, buckets: tuple[float, ...] = SLOW_BUCKETS
        ) -> Histogram:
            family = Histogram(PREFIX + name, text, LABELS, registry=self.registry, buckets=buckets)
            return family.labels(model)

        prompt_tokens = PrometheusCounter(
            PREFIX + "prompt_tokens", "Prompt tokens of requests", LABELS, registry=self.registry
        )
        self.prompt_tokens = prompt_tokens.labels(model)
        self.output = TokenCounters(model)
        self.registry.register(self.output)
        self.finished = LabeledCounter(
            self.registry, model, "request_success", "Choices that ended, by reason",
            "finished_reason", [(reason,) for reason in FINISH_REASONS],
        )  # fmt: skip
        self.dropped_spans = LabeledCounter(
            self.registry, model, "trace_spans_dropped",
            "Spans of requests that no collector got, by reason",
            "reason", [(reason,) for reason in SPAN_DROP_REASONS],
        )  # fmt: skip
        self.objectives = LabeledCounter(
            self.registry, model, "slo_choices",
            "Choices that ended by themselves, by the objective that they had and if it was met",
            "objective met", product(OBJECTIVES, ("true", "false")),
        )  # fmt: skip
        self.ttft = add_histogram("time_to_first_token_seconds", "Time to first token")
        self.tpot = add_histogram(
            "time_per_output_token_seconds", "Mean time per output token", FAST_BUCKETS
        )
        self.e2el = add_histogram("e2e_request_latency_seconds", "Arrival to the last token")
        self.queue = add_histogram("request_queue_time_seconds", "Arrival to first step")
        self.prefill = add_histogram("request_prefill_time_seconds", "First step to token")
        self.decode = add_histogram("request_decode_time_seconds", "First token to the last")
        self.inference = add_histogram(
            "request_inference_time_seconds", "First step to the last token"
        )
        self.request_prompt_tokens = add_histogram(
            "request_prompt_tokens", "Prompt tokens of a request that ended", TOKEN_BUCKETS
        )
        self.request_generation_tokens = add_histogram(
            "request_generation_tokens", "Tokens of a choice that ended", TOKEN_BUCKETS
        )

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format, also under vLLM's names."""
        text = generate_latest(self.registry).decode()
        return (text + repeat_with_aliases(text)).encode()
