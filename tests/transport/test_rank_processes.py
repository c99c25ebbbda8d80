"""Collectives of processes under random delays and kills: right results or a clean end."""

import json
import os
import subprocess
import sys

import pytest

from gllm.kernels.native.builds import BUILD_VARIABLE, OFF, select_build


def run_trials(kernels: str, **options: float) -> list[dict[str, int]]:
    """Return how many ranks of each trial ended in which way; see rank_processes.py."""
    arguments = [f"--{name}={value}" for name, value in options.items()]
    environment = os.environ | ({BUILD_VARIABLE: OFF} if kernels == OFF else {})
    if kernels != OFF and select_build().path is None:
        pytest.skip("no compiled kernels")
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.network.rank_processes", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=900,
    )
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize(
    ("ranks", "kernels"),
    [
        (2, "native"),
        *(
            pytest.param(ranks, kernels, marks=pytest.mark.full)
            for ranks, kernels in ((4, "native"), (2, OFF), (4, OFF))
        ),
    ],
)
def test_results_under_random_delays_are_right(kernels: str, ranks: int) -> None:
    collectives = 600 if kernels == "native" else 200
    assert run_trials(kernels, ranks=ranks, collectives=collectives) == [{"done": ranks}]


def check_kills(trials: list[dict[str, int]], ranks: int) -> None:
    """Check that every survivor ended cleanly and that ranks were killed while they computed."""
    assert all(trial == {"killed": 1, "closed": ranks - 1} for trial in trials), trials


@pytest.mark.parametrize(
    ("kernels", "trials"),
    [
        ("native", 2),
        pytest.param("native", 8, marks=pytest.mark.full),
        pytest.param(OFF, 8, marks=pytest.mark.full),
    ],
)
def test_a_killed_rank_leaves_a_clean_end(kernels: str, trials: int) -> None:
    ends = run_trials(kernels, ranks=3, collectives=10**6, kill=0.05, trials=trials)
    assert len(ends) == trials
    check_kills(ends, 3)


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["native", OFF])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ten_thousand_collectives(kernels: str, ranks: int) -> None:
    trials = run_trials(kernels, ranks=ranks, collectives=10_000, trials=2, seed=100)
    assert trials == [{"done": ranks}] * 2


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["native", OFF])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_many_kills(kernels: str, ranks: int) -> None:
    for delays in (0.0, 0.3):
        trials = run_trials(
            kernels, ranks=ranks, collectives=10**7, kill=0.1, trials=100, delays=delays, seed=7
        )
        check_kills(trials, ranks)
