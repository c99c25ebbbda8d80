"""Workloads: traces as they are known, generators as their parameters say, errors that help."""

from collections import Counter
from itertools import accumulate, pairwise
from math import inf, nan
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.observability.latency import percentile
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.lengths import NAMED_WORKLOADS, sample_lengths
from gllm.sim.workloads.requests import WorkloadRequest, make_workload, sample_arrival_times
from gllm.sim.workloads.traces import TRACES, load_trace
from tests.support.sim.requests import to_scheduler_requests

MANY = 20_000


def prompts(workload: str, count: int = MANY, seed: int = 0) -> list[int]:
    return [prompt for prompt, _ in sample_lengths(workload, count, seed)]


def gaps(kind: str, rate: float, count: int = 50_000) -> list[float]:
    return [
        after - before for before, after in pairwise(sample_arrival_times(kind, count, rate, 0))
    ]


# Traces.


@pytest.mark.parametrize(
    ("name", "rows", "prompt", "output", "minutes"),
    [
        ("azure-conv", 19_366, 1154.7, 211.1, 58),
        ("azure-code", 8_819, 2047.8, 27.9, 57),
        ("arxiv-4k", 28_257, None, None, None),
    ],
)
def test_traces_are_the_known_ones(
    name: str, rows: int, prompt: float | None, output: float | None, minutes: int | None
) -> None:
    trace = load_trace(TRACES[name])
    assert len(trace.lengths) == rows
    assert min(min(pair) for pair in trace.lengths) >= 1
    if minutes is None:
        assert trace.arrivals == []
        assert max(sum(pair) for pair in trace.lengths) <= 4096
        return
    assert fmean(p for p, _ in trace.lengths) == pytest.approx(prompt, abs=0.05)
    assert fmean(o for _, o in trace.lengths) == pytest.approx(output, abs=0.05)
    assert len(trace.arrivals) == rows
    assert trace.arrivals == sorted(trace.arrivals)
    assert trace.arrivals[0] == 0.0
    assert round(trace.arrivals[-1] / 60) == minutes


@pytest.mark.parametrize("name", TRACES)
def test_lengths_of_a_trace_are_drawn_without_replacement(name: str) -> None:
    lengths = load_trace(TRACES[name]).lengths
    few = Counter(sample_lengths(name, 1000, 0))
    assert few <= Counter(lengths)
    assert few != Counter(lengths[:1000])
    assert Counter(sample_lengths(name, len(lengths), 0)) == Counter(lengths)
    more = Counter(sample_lengths(name, len(lengths) + 5, 0))
    assert (more - Counter(lengths)).total() == 5


def test_sharegpt_like_is_the_trace_divided() -> None:
    lengths = sample_lengths("sharegpt-like", 19_366, 0)
    assert fmean(p for p, _ in lengths) == pytest.approx(1154.7 / 5.21, rel=0.01)
    assert fmean(o for _, o in lengths) == pytest.approx(211.1 / 1.66, rel=0.01)
    assert min(min(pair) for pair in lengths) == 1


def test_mixed_is_half_chats_and_a_quarter_each_of_code_and_papers() -> None:
    count = 8000
    lengths = sample_lengths("mixed", count, 0)
    known = {name: set(load_trace(TRACES[name]).lengths) for name in TRACES}
    alone = {
        name: known[name].difference(*(known[other] for other in TRACES if other != name))
        for name in TRACES
    }
    for name, share in (("azure-conv", 0.5), ("azure-code", 0.25), ("arxiv-4k", 0.25)):
        # Pairs that other traces have as well cannot be told apart: count the others' share.
        trace = load_trace(TRACES[name]).lengths
        telling = sum(pair in alone[name] for pair in trace) / len(trace)
        assert telling > 0.4
        found = sum(pair in alone[name] for pair in lengths)
        assert found == pytest.approx(count * share * telling, rel=0.05)
    halves = [fmean(p for p, _ in half) for half in (lengths[:4000], lengths[4000:])]
    assert halves[0] == pytest.approx(halves[1], rel=0.05)
    assert len(sample_lengths("mixed", 7, 0)) == 7


@pytest.mark.parametrize("workload", [*NAMED_WORKLOADS, "uniform:1,9,1,9", "sessions:4,3,2,8,8,8"])
def test_an_extended_run_begins_with_the_same_requests(workload: str) -> None:
    """Also where a trace is exhausted, or half of it."""
    requests = make_workload(workload, 1700, seed=3)
    for count in (1, 7, 900, 1601):
        assert make_workload(workload, count, seed=3) == requests[:count]


# Generators.


def test_fixed_lengths() -> None:
    assert sample_lengths("fixed:512,128", 3, 0) == [(512, 128)] * 3


def test_uniform_lengths_reach_their_bounds() -> None:
    lengths = sample_lengths("uniform:16,64,1,4", MANY, 0)
    assert {p for p, _ in lengths} == set(range(16, 65))
    assert {o for _, o in lengths} == {1, 2, 3, 4}
    assert fmean(p for p, _ in lengths) == pytest.approx(40, rel=0.01)
    assert Counter(o for _, o in lengths)[1] == pytest.approx(MANY / 4, rel=0.05)


def test_lognormal_has_its_median_and_90th_percentile() -> None:
    drawn = prompts("lognormal:400,1600,1000000,10,20,100")
    assert median(drawn) == pytest.approx(400, rel=0.03)
    assert percentile(drawn, 90) == pytest.approx(1600, rel=0.04)
    assert percentile(drawn, 10) == pytest.approx(100, rel=0.04)


def test_lognormal_is_cut_off() -> None:
    drawn = prompts("lognormal:400,1600,1600,10,20,100")
    assert max(drawn) <= 1600
    # What is cut off is drawn again, so the median is that of the lower nine tenths.
    uncut = sorted(prompts("lognormal:400,1600,1000000,10,20,100"))
    assert median(drawn) == pytest.approx(uncut[round(MANY * 0.45)], rel=0.03)
    assert sample_lengths("lognormal:100,100,100,1,9,1", 2, 0) == [(100, 1)] * 2


def test_zipf_weights_fall_with_the_rank() -> None:
    exponent, most = 0.8, 200
    found = Counter(prompts(f"zipf:{exponent},{most},1,1"))
    total = sum(rank**-exponent for rank in range(1, most + 1))
    for rank in (1, 2, 3, 4, 5):
        share = rank**-exponent / total
        deviation = (share * (1 - share) / MANY) ** 0.5
        assert found[rank] / MANY == pytest.approx(share, abs=4 * deviation)
    assert min(found) == 1
    assert most * 0.97 < max(found) <= most


# Arrivals.


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_poisson_arrivals(rate: float) -> None:
    found = gaps("poisson", rate)
    assert 1 / fmean(found) == pytest.approx(rate, rel=0.02)
    assert pstdev(found) / fmean(found) == pytest.approx(1, rel=0.02)
    # Counts in windows of fixed length have their mean for variance.
    counts = Counter(int(time * rate / 10) for time in accumulate(found))
    windows = [counts[i] for i in range(max(counts))]
    assert pstdev(windows) ** 2 / fmean(windows) == pytest.approx(1, rel=0.08)


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_gamma_arrivals(variation: float) -> None:
    found = gaps(f"gamma:{variation}", 4.0)
    assert 1 / fmean(found) == pytest.approx(4.0, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(variation, rel=0.05)


def test_static_arrivals_come_at_once() -> None:
    assert [job.arrival_seconds for job in make_workload("fixed:1,1", 4, arrivals="static")] == [
        0.0
    ] * 4


def test_replay_keeps_lengths_and_stretches_times() -> None:
    trace = load_trace(TRACES["azure-code"])
    plain = make_workload("azure-code", 100, arrivals="replay")
    assert plain == [
        WorkloadRequest(time, *pair)
        for time, pair in zip(trace.arrivals, trace.lengths, strict=True)
    ][:100]  # fmt: skip
    slow = make_workload("azure-code", 100, arrivals="replay", time_scale=2.5, seed=9)
    assert [job[1:] for job in slow] == [job[1:] for job in plain]
    assert [job.arrival_seconds for job in slow] == [2.5 * job.arrival_seconds for job in plain]


# Seeds.

KINDS = [*NAMED_WORKLOADS, "uniform:1,99,1,99", "lognormal:9,99,999,9,99,999", "zipf:0.5,99,1.5,99"]


@pytest.mark.parametrize("workload", KINDS)
def test_a_seed_gives_the_same_jobs(workload: str) -> None:
    for arrivals in ("poisson", "gamma:2"):
        first = make_workload(workload, 50, 3.0, arrivals, seed=7)
        assert len(first) == 50
        assert first == make_workload(workload, 50, 3.0, arrivals, seed=7)
        other = make_workload(workload, 50, 3.0, arrivals, seed=8)
        assert [job.arrival_seconds for job in first] != [job.arrival_seconds for job in other]
        assert [job[1:] for job in first] != [job[1:] for job in other]


def test_the_rate_changes_when_but_not_what() -> None:
    slow, fast = (make_workload("azure-conv", 50, rate, seed=7) for rate in (1.0, 4.0))
    assert [job[1:] for job in slow] == [job[1:] for job in fast]
    assert [job.arrival_seconds / 4 for job in slow] == pytest.approx(
        [job.arrival_seconds for job in fast]
    )


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workload": "azure"}, r"'azure' is none of azure-conv, .*mixed, .*uniform:\.\.\."),
        ({"workload": ""}, "'' is none of azure-conv"),
        ({"workload": "fixed"}, "fixed takes LENGTH of the prompt, .* output: 2 numbers"),
        ({"workload": "fixed:512"}, "fixed takes LENGTH .* 2 numbers"),
        ({"workload": "fixed:512,1,1"}, "2 numbers"),
        ({"workload": "fixed:0.4,1"}, "lengths at least 1"),
        ({"workload": "fixed:8,-1"}, "lengths at least 1"),
        ({"workload": "fixed:nan,1"}, "fixed takes LENGTH"),
        ({"workload": "fixed:inf,1"}, "fixed takes LENGTH"),
        ({"workload": "uniform:1,2,3"}, "uniform takes LOW,HIGH .* 4 numbers"),
        ({"workload": "uniform:a,b,c,d"}, "uniform takes LOW,HIGH .* 4 numbers"),
        ({"workload": "uniform:16,8,1,2"}, "in this order"),
        (
            {"workload": "lognormal:9,8,99,1,2,3"},
            "lognormal takes MEDIAN,P90,MOST .* in this order",
        ),
        ({"workload": "lognormal:9,19,5,1,2,3"}, "6 numbers"),
        ({"workload": "zipf:0,9,1,9"}, "zipf takes EXPONENT,MOST"),
        ({"workload": "zipf:1,0,1,9"}, "zipf takes EXPONENT,MOST"),
        ({"rate": 0.0}, r"rate is 0\.0, but must be above 0"),
        ({"rate": -1.0}, r"rate is -1\.0, but must be above 0"),
        ({"rate": nan}, "rate is nan, but must be above 0"),
        ({"rate": inf}, "rate is inf"),
        ({"arrivals": "wave"}, "'wave' is none of poisson, gamma:CV, burst:SIZE, static, replay"),
        ({"arrivals": "burst:1.5"}, "burst takes a whole number"),
        ({"arrivals": "poisson:3"}, "'poisson:3' is none of poisson"),
        ({"arrivals": "static:3"}, "'static:3' is none of poisson"),
        ({"arrivals": "gamma"}, "'gamma': gamma takes a CV above 0, as in gamma:2"),
        ({"arrivals": "gamma:"}, "gamma takes a CV above 0"),
        ({"arrivals": "gamma:x"}, "'gamma:x': gamma takes a CV above 0"),
        ({"arrivals": "gamma:0"}, "'gamma:0': gamma takes a CV above 0"),
        ({"arrivals": "gamma:-2"}, "gamma takes a CV above 0"),
        ({"arrivals": "gamma:1,2"}, "gamma takes a CV above 0"),
        ({"arrivals": "gamma:inf"}, "gamma takes a CV above 0"),
        ({"arrivals": "replay"}, "'fixed:8,8' has no arrivals to replay: azure-conv has"),
        ({"arrivals": "replay", "workload": "arxiv-4k"}, "no arrivals to replay: azure-conv has"),
        ({"arrivals": "replay", "workload": "azure-code", "time_scale": 0}, "time_scale is 0"),
        ({"arrivals": "replay", "workload": "azure-code", "count": 8820}, "has 8819 requests to"),
        ({"arrivals": "replay", "workload": "azure-code", "time_scale": -1}, "time_scale is -1"),
    ],
)
def test_bad_input_is_refused_with_the_fix(options: dict[str, Any], message: str) -> None:
    known: dict[str, Any] = {"workload": "fixed:8,8", "count": 5}
    with pytest.raises(ValueError, match=message):
        make_workload(**known | options)


# Requests.


@given(
    st.lists(
        st.builds(
            WorkloadRequest,
            st.floats(0, 9),
            st.integers(1, 70),
            st.integers(1, 9),
            st.just(()),
            st.just(""),
            st.just(0),
            st.just(""),
            st.just(0),
            st.none(),
        )
    )
)
def test_requests_are_the_jobs_and_their_prompts_share_no_token(
    jobs: list[WorkloadRequest],
) -> None:
    requests = to_scheduler_requests(jobs)
    assert [
        WorkloadRequest(time, len(r.prompt_token_ids), r.max_tokens) for time, r in requests
    ] == jobs
    assert [request.seq for _, request in requests] == list(range(len(jobs)))
    tokens = [token for _, request in requests for token in request.prompt_token_ids]
    assert len(set(tokens)) == len(tokens)


def test_the_prefix_cache_finds_nothing_in_common() -> None:
    resolved = SchedulerConfig(block_size=1).resolve(1, 500, 100)
    pipeline = SimulatedPipeline(resolved, ConstantCostModel(0.1))
    pipeline.submit_each(to_scheduler_requests(make_workload("uniform:1,40,1,9", 50, 2.0)))
    pipeline.loop.run()
    stats = pipeline.scheduler.stats()
    assert stats.prefix_queries > 0
    assert stats.prefix_hits == 0


def test_lengths_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "observed.csv"
    path.write_text("prompt_tokens,output_tokens\n19,9\n21,11\n5,1\n")
    workload = f"file:{path}"
    assert Counter(sample_lengths(workload, 3, 0)) == Counter([(19, 9), (21, 11), (5, 1)])
    assert Counter(sample_lengths(workload, 6, 1)) == Counter(2 * [(19, 9), (21, 11), (5, 1)])
    assert [job[1:3] for job in make_workload(workload, 3, 2.0)] == sample_lengths(workload, 3, 0)
    # The order is the seed's, whatever the number of passes over the file.
    for count in (3, 6, 7):
        orders = {tuple(sample_lengths(workload, count, seed)) for seed in range(20)}
        assert len(orders) > 3, count
    for text in (
        "prompt,output\n1,2\n",
        "prompt_tokens,output_tokens\n",
        "prompt_tokens,output_tokens\n1,0\n",
        "prompt_tokens,output_tokens\n1\n",
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match="give the columns prompt_tokens and output_tokens"):
            sample_lengths(workload, 3, 0)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        sample_lengths(f"file:{tmp_path}/none.csv", 3, 0)


def test_two_rows_of_a_file_do_not_go_to_two_engines(tmp_path: Path) -> None:
    """In the file's order, a router in turns would send all long requests to one engine."""
    path = tmp_path / "two.csv"
    path.write_text("prompt_tokens,output_tokens\n1900,9\n21,11\n")
    even = sample_lengths(f"file:{path}", 1000, 0)[::2]
    assert even.count((1900, 9)) == pytest.approx(250, abs=60)


def test_a_file_with_times_is_replayed_in_its_order(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0.5,19,9\n2,5,1\n2,7,3\n")
    workload = f"file:{path}"
    jobs = make_workload(workload, 3, arrivals="replay", seed=7)
    assert [job[:3] for job in jobs] == [(0.5, 19, 9), (2.0, 5, 1), (2.0, 7, 3)]
    path.write_text("prompt_tokens,output_tokens\n19,9\n")
    with pytest.raises(ValueError, match="has no arrivals to replay"):
        make_workload(workload, 1, arrivals="replay")
    for times in (["2", "1"], ["-1", "1"], ["0", "x"], ["0", "inf"], ["nan", "1"]):
        rows = "".join(f"{time},19,9\n" for time in times)
        path.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
        with pytest.raises(ValueError, match="arrival_s: give seconds"):
            make_workload(workload, 2, arrivals="replay")
