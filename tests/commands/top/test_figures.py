"""What `gllm top` makes of /metrics."""

import math
import time
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gllm.commands.top.figures import ScrapeHistory, metrics_between, quantile, subtract_buckets
from gllm.deploy.metrics_scrape import MetricsScrape, parse_metrics
from gllm.engine.interface import OutputDelta
from gllm.frontend.metrics import Metrics
from gllm.frontend.request_metrics import RequestMetrics
from gllm.messages.reports import BubbleReport, StageUtilization
from gllm.scheduler.plan import SchedulerStats
from gllm.text.tokenizer import Tokenizer
from tests.support.http.fake_engine import FakeEngine, node_report
from tests.support.text import tokenizers as some


def scrape(time: float, output: float = 0.0, **more: float) -> MetricsScrape:
    values = {"generation_tokens_total": output, **more}
    return MetricsScrape(time, "m", values, counters=set(values))


def test_a_real_server_s_metrics_are_read() -> None:
    engine = FakeEngine(Tokenizer(some.byte_level()))
    metrics = Metrics(engine)
    before = parse_metrics(metrics.render().decode(), 10.0)
    record = RequestMetrics(metrics, arrival=-math.inf, prompt_tokens=7, choices=1)
    record.on_delta(OutputDelta(0, "a", [1, 2]))
    record.on_delta(OutputDelta(0, "b", [3, 4]))
    record.close()
    engine.stats = SchedulerStats(
        *(5, 2, 0.5, 3, 20, 1, 400, 100),
        prefill_tokens=300,
        decode_tokens=20,
        state_slots=64,
        used_state_slots=3,
    )
    engine.rank_loads = {(0, 0): StageUtilization(0, 20, 4.0), (1, 0): StageUtilization(1, 20, 2.5)}
    engine.bubbles = BubbleReport([0.7, 1.6], 6.0)
    engine.recoveries = {"killed": 2, "frozen": 1}
    engine.recovering_since = time.monotonic() - 5.0
    found = metrics_between(before, parse_metrics(metrics.render().decode(), 12.0))
    assert found.recoveries == 3
    assert 5.0 <= found.recovering_seconds < 60.0
    assert (found.model, found.running, found.waiting) == ("fake/model", 5, 2)
    assert (found.in_flight, found.preemptions, found.kv_usage) == (3, 1, 0.5)
    assert (found.prompt_rate, found.output_rate) == (150, 2)
    assert (found.step_rate, found.step_tokens, found.prefix_hits) == (10, 16, 0.25)
    assert (found.used_state_slots, found.state_slots) == (3, 64)
    assert [stage.busy for stage in found.stages] == [0.5, 0.25]
    assert [stage.bubble for stage in found.stages] == pytest.approx([0.1, 0.3])
    assert found.ttft.p50 == 320, "beyond the last bound: the last bound"
    assert 0 <= found.itl.p50 <= 0.001


def test_speculation_is_read() -> None:
    engine = FakeEngine(Tokenizer(some.byte_level()))
    metrics = Metrics(engine)
    engine.stats = SchedulerStats(accepted_per_position=(0,))
    before = parse_metrics(metrics.render().decode(), 10.0)
    engine.stats = SchedulerStats(
        drafts=10, draft_tokens=30, accepted_tokens=15, accepted_per_position=(15,)
    )
    found = metrics_between(before, parse_metrics(metrics.render().decode(), 12.0))
    assert found.has_speculation
    assert (found.accepted_share, found.tokens_per_window) == (0.5, 2.5)


def test_connections_of_machines_that_begin_anew_are_no_new_server() -> None:
    engine = FakeEngine(Tokenizer(some.byte_level()))
    engine.node_reports = [node_report("a"), node_report("b", state="spare")]
    metrics = Metrics(engine)
    before = parse_metrics(metrics.render().decode(), 10.0)
    engine.node_reports = [node_report("a", links=[]), node_report("b", state="lost", links=[])]
    engine.num_node_losses = 1
    after = parse_metrics(metrics.render().decode(), 12.0)
    assert after.follows(before)
    found = metrics_between(before, after)
    assert {state: n for state, n in found.node_counts.items() if n} == {"member": 1, "lost": 1}
    assert found.node_losses == 1


def test_ranks_of_a_stage_have_metrics_of_their_own() -> None:
    engine = FakeEngine(Tokenizer(some.byte_level()))
    engine.rank_loads = {
        (0, 0): StageUtilization(0, 10, 3.0),
        (1, 0): StageUtilization(1, 10, 2.0),
        (1, 1): StageUtilization(1, 10, 2.5, rank=1),
    }
    metrics = Metrics(engine)
    text = metrics.render().decode()
    before = parse_metrics(text, 10.0)
    assert before.stages["tensor_parallel_size"] == {0: 1, 1: 2}
    # A stage of one rank has its own metrics only.
    assert before.ranks["rank_busy_seconds_total"] == {(1, 0): 2.0, (1, 1): 2.5}
    assert before.ranks["rank_steps_total"] == {(1, 0): 10, (1, 1): 10}
    engine.rank_loads = {
        (0, 0): StageUtilization(0, 12, 4.0),
        (1, 0): StageUtilization(1, 12, 3.0),
        (1, 1): StageUtilization(1, 12, 3.0, rank=1),
    }
    found = metrics_between(before, parse_metrics(metrics.render().decode(), 12.0))
    assert [stage.busy for stage in found.stages] == [0.5, 0.5]
    assert [stage.ranks for stage in found.stages] == [(), (0.5, 0.25)]


@pytest.mark.parametrize("text", ["", "<html>", "# TYPE up gauge\nup 1\n", "gllm:x{ 1\n"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the parser's own words differ)
        parse_metrics(text, 0.0)


def test_what_cannot_be_known_is_nan() -> None:
    stages = {name: {0: 1.0} for name in ("stage_busy_seconds_total", "stage_bubble_seconds_total")}
    found = metrics_between(scrape(1.0), replace(scrape(1.0), stages=stages))
    assert math.isnan(found.stages[0].busy)
    assert math.isnan(found.stages[0].bubble)
    assert math.isnan(found.output_rate)
    assert math.isnan(found.prefix_hits)
    assert math.isnan(found.step_tokens)
    assert math.isnan(found.ttft.p99)


def test_a_server_that_began_anew_counts_from_zero() -> None:
    before = scrape(10.0, output=500, num_preemptions_total=4)
    after = scrape(12.0, output=520, num_preemptions_total=1)
    assert metrics_between(before, after).output_rate == 260
    other = replace(scrape(12.0, output=600, num_preemptions_total=5), model="other")
    assert metrics_between(before, other).output_rate == 300


def test_history_looks_back_five_seconds_and_no_further() -> None:
    history = ScrapeHistory()
    for second in range(21):
        found = history.add(scrape(float(second), output=10.0 * second if second > 10 else 0.0))
    assert found.output_rate == 10
    assert list(history.rates)[-3:] == [10, 10, 10]
    assert len(history.rates) == 20


def test_history_over_a_restart() -> None:
    history = ScrapeHistory()
    for second, output in enumerate([1000.0, 1100.0, 30.0, 60.0]):
        found = history.add(scrape(float(second), output))
    assert list(history.rates) == [100, 30, 30]
    assert found.output_rate == 30


def test_history_over_a_long_absence() -> None:
    history = ScrapeHistory()
    history.add(scrape(0.0, 100.0))
    history.add(scrape(1.0, 110.0))
    assert history.add(scrape(101.0, 1110.0)).output_rate == 10


def test_no_share_is_more_than_all() -> None:
    busy = replace(scrape(2.0), stages={"stage_busy_seconds_total": {0: 1.5, 1: 0.5}})
    assert [stage.busy for stage in metrics_between(scrape(1.0), busy).stages] == [1, 0.5]


def test_quantiles_within_buckets() -> None:
    counts = {1.0: 0.0, 2.0: 10.0, 4.0: 20.0, math.inf: 20.0}
    assert quantile(counts, 0.5) == 2
    assert quantile(counts, 0.25) == 1.5
    assert quantile(counts, 0.75) == 3
    assert quantile({1.0: 0.0, math.inf: 5.0}, 0.5) == 1
    assert math.isnan(quantile({1.0: 0.0, math.inf: 0.0}, 0.5))
    assert math.isnan(quantile({}, 0.5))


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=50),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=8, unique=True),
    st.sampled_from([0.01, 0.5, 0.99]),
)
@example([1.0, 2.0], [1.9937764826132416, 0.2583279590354811], 0.5)
def test_a_quantile_is_in_the_bucket_of_the_true_one(
    values: list[float], bounds: list[float], q: float
) -> None:
    edges = [*sorted(bounds), math.inf]
    counts = {edge: float(sum(value <= edge for value in values)) for edge in edges}
    true = sorted(values)[math.ceil(q * len(values)) - 1]
    found = quantile(counts, q)
    upper = min(edge for edge in edges if true <= edge)
    lower = max((edge for edge in edges if edge < true), default=0.0)
    assert lower <= found <= upper


def test_a_histogram_s_difference() -> None:
    assert subtract_buckets({2.0: 1.0}, {math.inf: 9.0, 2.0: 4.0}) == {2.0: 3.0, math.inf: 9.0}
