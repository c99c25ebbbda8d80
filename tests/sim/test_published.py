"""Workloads by published statistics, ShareGPT's lengths, and classes of requests."""

import json
import random
from collections import Counter
from statistics import fmean, median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.commands.bench.client import request_body
from gllm.commands.bench.load import plan_load
from gllm.commands.bench.options import LoadConfig, ServeConfig
from gllm.commands.simulate import main
from gllm.observability.latency import percentile
from gllm.sim.options import SimulationConfig, build_workload
from gllm.sim.workloads.classes import assign_classes, parse_priorities, parse_shares
from gllm.sim.workloads.lengths import (
    PUBLISHED_WORKLOADS,
    TruncatedLognormal,
    fit_published_lengths,
    sample_lengths,
)
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.support.sim.requests import to_scheduler_requests

MANY = 10_000


def statistics(values: list[int]) -> tuple[float, float, float]:
    return fmean(values), median(values), percentile(values, 90)


# Workloads.


@pytest.mark.parametrize(
    ("name", "prompt", "output", "most"),
    [
        ("arxiv-4k", (2588, 2730, 3702), (291, 167, 372), 4096),
        ("chat-1m", (686, 417, 1678), (197, 139, 484), 4096),
        ("bwb-4k", (1067, 1037, 1453), (1612, 1601, 2149), 4096),
        ("sharegpt", (758.7, 680, 1547), (186.3, 76.5, 513), 2048),
    ],
)
def test_samples_have_the_published_mean_median_and_90th_percentile(
    name: str, prompt: tuple[float, ...], output: tuple[float, ...], most: int
) -> None:
    """Within 2 %: Vidur's Table 1 and DistServe's run (V14).

    The standard error of the means of 10,000 heavy-tailed lengths is 1 %, so a seed may miss.
    """
    lengths = sample_lengths(name, MANY, 2)
    assert statistics([pair[0] for pair in lengths]) == pytest.approx(prompt, rel=0.02)
    assert statistics([pair[1] for pair in lengths]) == pytest.approx(output, rel=0.02)
    assert max(map(sum, lengths)) <= most
    assert min(map(min, lengths)) >= 1


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("chat-1m", (686, 417, 1678), (197, 139, 484)),
        ("bwb-4k", (1067, 1037, 1453), (1612, 1601, 2149)),
    ],
)
def test_fitted_distributions_have_the_published_statistics(
    name: str, prompt: tuple[float, ...], output: tuple[float, ...]
) -> None:
    """Free of sampling error; the median and the 90th percentile exactly."""
    model = fit_published_lengths(name)
    for fitted, published in ((model.prompt, prompt), (model.output, output)):
        assert fitted.mean == pytest.approx(published[0], rel=0.02)
        assert fitted.quantile(0.5) == pytest.approx(published[1], rel=1e-6)
        assert fitted.quantile(0.9) == pytest.approx(published[2], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "prompt", "output"), [("humaneval", 171, 98), ("longbench", 1738, 91)]
)
def test_samples_have_the_published_means(name: str, prompt: float, output: float) -> None:
    lengths = sample_lengths(name, MANY, 0)
    assert fmean(pair[0] for pair in lengths) == pytest.approx(prompt, rel=0.02)
    assert fmean(pair[1] for pair in lengths) == pytest.approx(output, rel=0.02)
    assert max(map(sum, lengths)) <= 2048


@pytest.mark.parametrize("name", PUBLISHED_WORKLOADS)
def test_lengths_of_prompt_and_output_are_truncated_lognormals(name: str) -> None:
    model = fit_published_lengths(name)
    for index, lengths in enumerate(model[:2]):
        assert isinstance(lengths, TruncatedLognormal)
        drawn = [pair[index] for pair in sample_lengths(name, MANY, 1)]
        for share in (0.1, 0.25, 0.5, 0.75):
            expected = lengths.quantile(share)
            assert percentile(drawn, 100 * share) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", [*PUBLISHED_WORKLOADS, "sharegpt"])
def test_every_workload_is_one_of_bench_and_of_simulate(name: str) -> None:
    planned = plan_load(ServeConfig(load=LoadConfig(name, 20)), 100)
    jobs = build_workload(SimulationConfig(workload=name, requests=20))
    ours = [(job.num_prompt_tokens, job.num_output_tokens) for job in jobs]
    assert [(len(p.prompt), p.output_tokens) for p in planned] == ours


# Truncated lognormals.


@given(
    median=st.floats(2, 2000),
    ratio=st.floats(1.05, 5),
    room=st.floats(1.5, 100),
)
def test_quantiles_of_a_fit_are_the_given_ones(median: float, ratio: float, room: float) -> None:
    p90 = median * ratio
    most = p90 * ratio * room
    fitted = TruncatedLognormal.from_quantiles(median, p90, most)
    assert fitted.quantile(0.5) == pytest.approx(median, rel=1e-6)
    assert fitted.quantile(0.9) == pytest.approx(p90, rel=1e-6)
    assert fitted.quantile(1 - 1e-9) <= most * (1 + 1e-9)


@given(share=st.floats(0.01, 0.95), sigma=st.floats(0.1, 1.5))
def test_the_mean_of_a_fit_is_the_given_one(share: float, sigma: float) -> None:
    fitted = TruncatedLognormal.from_mean(1000 * share, sigma, 1000)
    assert fitted.mean == pytest.approx(1000 * share, rel=1e-6)


@pytest.mark.parametrize(("mu", "most"), [(5.0, 100.0), (5.0, 1e6), (9.0, 2000.0)])
def test_mean_and_samples_agree(mu: float, most: float) -> None:
    lengths = TruncatedLognormal(mu, 0.7, most)
    rng = random.Random(0)
    drawn = [lengths.sample(rng) for _ in range(MANY)]
    assert fmean(drawn) == pytest.approx(lengths.mean, rel=0.02)
    assert max(drawn) <= most


def test_statistics_that_no_lognormal_has_are_refused() -> None:
    with pytest.raises(ValueError, match="no lognormal below 2000 has median 1000 and p90 1999"):
        TruncatedLognormal.from_quantiles(1000, 1999, 2000)
    with pytest.raises(ValueError, match="mean is 2000, but has to be above 0 and below 2000"):
        TruncatedLognormal.from_mean(2000, 0.6, 2000)


# Classes.


def test_requests_get_priorities_and_slo_classes_by_their_shares() -> None:
    config = SimulationConfig(
        workload="fixed:1,1", requests=MANY, priorities="0:0.9,-1:0.1", slo_classes="chat:7,batch:3"
    )
    jobs = build_workload(config)
    assert jobs == build_workload(config)
    ranks, names = (Counter(job[index] for job in jobs) for index in (5, 6))
    assert set(ranks) == {0, -1}
    assert ranks[-1] / MANY == pytest.approx(0.1, abs=0.01)
    assert set(names) == {"chat", "batch"}
    assert names["chat"] / MANY == pytest.approx(0.7, abs=0.015)
    # The two are independent of each other, and of lengths and times.
    both = sum(job.priority == -1 and job.slo_class == "chat" for job in jobs)
    assert both / MANY == pytest.approx(0.07, abs=0.01)
    plain = make_workload("fixed:1,1", MANY, config.rate)
    assert [job[:5] for job in jobs] == [job[:5] for job in plain]


def test_a_conversation_has_one_class() -> None:
    jobs = make_workload("sessions:8,6,1,10,10,10", 200, seed=1)
    labelled = assign_classes(jobs, {0: 1, 1: 1}, {"a": 1, "b": 1})
    classes: dict[str, set[Any]] = {}
    for job in labelled:
        classes.setdefault(job.session, set()).add((job.priority, job.slo_class))
    assert all(len(klass) == 1 for klass in classes.values())
    assert len(set.union(*classes.values())) == 4


@pytest.mark.parametrize("workload", ["fixed:4,4", "sessions:8,6,1,10,10,10"])
def test_bench_sends_the_priorities_that_the_simulator_gives(workload: str) -> None:
    shares = "0:0.5,2:0.5"
    config = SimulationConfig(workload=workload, requests=60, priorities=shares)
    options = ServeConfig(load=LoadConfig(workload, 60), request_rate=4.0, priorities=shares)
    planned = plan_load(options, 100)
    assert [p.priority for p in planned] == [job.priority for job in build_workload(config)]
    bodies = [json.loads(request_body(options, "m", 0, each)) for each in planned]
    assert {body["priority"] for body in bodies} == {0, 2}
    plain = plan_load(ServeConfig(load=LoadConfig(workload, 60)), 100)
    assert all("priority" not in json.loads(request_body(options, "m", 0, p)) for p in plain)


def test_the_scheduler_knows_the_priority() -> None:
    jobs = [WorkloadRequest(0.0, 3, 1, priority=rank) for rank in (2, 0, -1)]
    assert [request.priority for _, request in to_scheduler_requests(jobs)] == [2, 0, -1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chat", "'chat' has to be NAME:SHARE"),
        ("chat:0", "'chat:0' has to be NAME:SHARE with a share above 0"),
        ("chat:-1", "NAME:SHARE"),
        ("chat:inf", "NAME:SHARE"),
        ("chat:nan", "NAME:SHARE"),
        (":1", "':1' has to be NAME:SHARE"),
        ("a:1,a:2", "each name once"),
        ("a:1,", "'' has to be NAME:SHARE"),
    ],
)
def test_bad_shares_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_shares(text)
    with pytest.raises(ValueError, match=message):
        build_workload(SimulationConfig(workload="fixed:1,1", requests=1, slo_classes=text))


def test_priorities_are_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"--priorities 0\.5:1: '0\.5' has to be a whole number"):
        parse_priorities("0.5:1")
    assert main(["--requests", "2", "--priorities", "high:1"]) == 2
    assert "--priorities high:1: 'high' has to be a whole number" in capsys.readouterr().err
