"""Drift of hand-made samples, the verdict of a soak test, and a short one of a real server."""

import random
from pathlib import Path

import msgspec
import pytest
import uvloop

from benchmarks.soak import (
    LoopSample,
    evaluate,
    format_page,
    parse_options,
    run_soak,
)
from benchmarks.soak_load import SHARES, LoadTally, plan_texts
from benchmarks.soak_samples import (
    ProcessSample,
    drift_at_equal_age,
    drift_of_role,
    growth_per_recovery,
    measure_drift,
)
from gllm.kernels.native.builds import select_build

pytestmark = pytest.mark.full

ROLE = "head gllm-stage-0"


def sample(seconds: float, size: float, pid: int = 1, age: float | None = None) -> ProcessSample:
    at = seconds if age is None else age
    epoch = int(seconds // 60) + 1
    return ProcessSample(ROLE, pid, seconds, at, epoch, int(size), 0, 20, 5)


def lives(leak_per_second: float, leak_per_age: float = 0.0) -> list[ProcessSample]:
    """Samples of processes that are replaced every 100 s and grow while they are young."""
    rows = []
    for step in range(180):
        seconds = 10.0 * step
        pid, age = divmod(seconds, 100.0)
        young = 1_000_000 - 500_000 * 0.9 ** (age / 10)
        size = young + leak_per_second * seconds + leak_per_age * age
        rows.append(sample(seconds, size, int(pid), age))
    return rows


def test_noise_and_single_samples_are_no_drift() -> None:
    chooser = random.Random(0)
    points = [(float(at), 100 + chooser.uniform(-1, 1)) for at in range(180)]
    points[5] = (5.0, 1000.0)
    points[170] = (170.0, 9000.0)
    assert abs(measure_drift(points).share) < 0.005


def test_growth_is_measured_between_the_middles_of_the_thirds() -> None:
    drift = measure_drift((float(at), 1000.0 + at) for at in range(301))
    assert (drift.first, drift.last) == (1050, 1250)
    assert drift.share == pytest.approx(200 / 1150)
    with pytest.raises(ValueError, match="different times"):
        measure_drift([(1.0, 1.0)])
    with pytest.raises(ValueError, match="needs samples"):
        measure_drift([])


def test_replaced_processes_are_compared_at_equal_age() -> None:
    flat, growing = lives(0.0), lives(50.0)
    assert drift_of_role(flat, "memory_bytes").share == pytest.approx(0, abs=0.001)
    assert drift_of_role(flat, "memory_bytes").num_lives == 18
    # 50 bytes per second between the middles of the thirds, 1,200 s apart, of some 850,000.
    assert drift_of_role(growing, "memory_bytes").share == pytest.approx(0.07, abs=0.02)
    with pytest.raises(ValueError, match="needs samples"):
        drift_at_equal_age([sample(0, 1), sample(1, 1)], "memory_bytes")


def test_growth_per_survived_recovery() -> None:
    rows = [sample(10.0 * step, 1000 + 7 * (step // 6)) for step in range(60)]
    # Ten epochs; the first is left out.
    assert growth_per_recovery(rows, "memory_bytes") == (7, 8)
    assert growth_per_recovery(rows[:6], "memory_bytes") == (0, 0)


class FakeRecord:
    """The samples of a soak test without a server."""

    def __init__(self, leak_per_second: float, num_tasks: float = 50.0) -> None:
        self.busy = lives(leak_per_second)
        self.idle = [sample(120.0 * step, 1000) for step in range(15)]
        self.loop = [
            LoopSample(10.0 * step, step % 12 == 0, num_tasks + step, 20, 4, 0.1, step // 6)
            for step in range(180)
        ]
        self.kills = {ROLE: 17}
        self.problems: list[str] = []


def test_the_verdict_names_what_grew_and_what_was_lost() -> None:
    tally = LoadTally(lost=["stream: HTTP 500"], differing=["slow 3: 'x'"], accepted=["no JSON: y"])
    record = FakeRecord(50.0)
    results = evaluate(record, tally, warm_up=100.0)  # type: ignore[arg-type]
    causes = [line.split(" grew")[0] for line in results["problems"]]
    assert causes == [
        f"{ROLE} | memory_bytes | under load",
        "head gllm-frontend | num_tasks | under load",
        "head gllm-frontend | num_tasks | idle",
        "lost: stream: HTTP 500",
        "another text: slow 3: 'x'",
        "bad request: no JSON: y",
    ]
    assert (results["lost"], results["differing"], results["not_refused"]) == (1, 1, 1)
    options = parse_options(["--minutes", "30", "--", "--pp", "2"])
    assert (options.warm_up_minutes, options.flags) == (3, ["--pp", "2"])
    page = format_page(results, options)
    assert "`python -m gllm.serve demo --pp 2`" in page
    assert "lost: 1;" in page
    assert f"{ROLE} 17; recoveries: 29" in page


def test_a_flat_run_has_no_problems() -> None:
    record = FakeRecord(0.0, num_tasks=1e6)
    results = evaluate(record, LoadTally(), warm_up=100.0)  # type: ignore[arg-type]
    assert results["problems"] == []
    assert "Problems: none." in format_page(results, parse_options([]))
    # A process with few samples is listed nowhere: it is on its way to another title.
    assert all(name.startswith(("head gllm-stage-0", "head gllm-fr")) for name in results["drifts"])


def test_the_load_has_all_kinds_of_requests() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)
    assert SHARES["abort"] == 0.2
    texts = plan_texts(48, 160)
    assert len({msgspec.json.encode(each) for each in texts}) == 48
    assert {each.path for each in texts} == {"/v1/completions", "/v1/chat/completions"}
    assert sum("response_format" in each.fields for each in texts) == 6


@pytest.mark.long
def test_a_short_soak_test_of_a_server(tmp_path: Path) -> None:
    words = (
        f"--minutes 0.4 --idle-minutes 0.2 --kill-seconds 7 --sample-seconds 1 --streams 6 "
        f"--texts 8 --max-tokens 60 --server-log {tmp_path / 'log'} "
        "-- --pp 2 --threads 1 --dtype float32 --kv-cache-memory 64MiB"
    )
    results = uvloop.run(run_soak(parse_options(words.split())))
    # A run of seconds is too short for drifts: memory still grows.
    problems = [line for line in results["problems"] if " grew by " not in line]
    if select_build().path is None:
        problems = [line for line in problems if not line.startswith("another text")]
    assert problems == []
    assert results["lost"] == results["not_refused"] == 0
    assert results["identical"] + results["differing"] > 10
    assert results["recoveries"] >= 1
    assert any("gllm-stage-1 | num_descriptors" in name for name in results["drifts"])
