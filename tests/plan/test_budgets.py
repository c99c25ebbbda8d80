"""Budgets of all planners: they count from the begin of the command, and end its simulations."""

from pathlib import Path

import pytest

from gllm.commands.plan.command import run_strategy
from gllm.plan.serving_plan import read_plan
from gllm.plan.strategies import STRATEGIES
from tests.plan.test_limited_capacity import TickingClock

MODEL = ["--model", "opt-13b"]
WORKLOAD = ["--workload", "fixed:64,4"]
LIMITS = ["--slo", "ttft=2,tpot=0.1"]
COMMANDS = {
    "goodput": [*MODEL, *WORKLOAD, "--gpus-per-node", "2", "--rate", "1"],
    "search": [
        *MODEL, *WORKLOAD, *LIMITS, "--devices", "A100-80G", "--pp", "1", "--tp", "1",
        "--policies", "vllm", "--max-num-seqs", "64",
    ],
    "capacity": [*MODEL, *WORKLOAD, *LIMITS, "--device", "A100-80G", "--pp", "1"],
    "scale": [*MODEL, *LIMITS, "--trace", "fixed:64,4", "--rate", "1", "--gpus", "1"],
    "pools": ["--workload", "code", "--designs", "HH", "--max-machines", "2"],
    "hetero": [*MODEL, *WORKLOAD, "--cluster", "hom4", "--simulate"],
}  # fmt: skip
"""Command lines of small problems, without a budget."""


def test_every_planner_has_a_budget() -> None:
    assert set(COMMANDS) == set(STRATEGIES)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_ends_soon_after_its_budget(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock is read within simulations, so it passes the end of the budget there."""
    clock = TickingClock(1.0)
    jobs = ["--jobs", "1"] if name in ("search", "capacity") else []
    path = tmp_path / "plan.yaml"
    command = [*COMMANDS[name], *jobs, "--budget", "12", "--output", str(path)]
    status = run_strategy(name, command, clock)
    assert clock.now <= 12 + 5
    text = "".join(capsys.readouterr())
    assert "the budget of 12 s is spent" in text
    # hetero has a plan without a simulation.
    assert (status == 0) == path.exists() == (name == "hetero")
    assert name != "hetero" or read_plan(path).engines
