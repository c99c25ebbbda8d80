"""Experiments on emulated devices, with simulated engines in place of the served ones."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import emulated, two_machines, two_nodes
from experiments.__main__ import EMULATED, main
from experiments.base import ExperimentOptions, claims_table, write_result
from experiments.claims import ExpectedLimit, PaperClaim, join_claims
from experiments.emulated_trials import (
    ENGINES,
    MAX_CORES,
    MAX_ENGINES,
    EngineLoad,
    LoadedEngine,
    ServedWorkload,
    estimate_load,
    group_engines,
    serve_trials,
    trial_config,
)
from experiments.trials import (
    L20_32B,
    MAX_MODEL_LEN,
    SimulationTrial,
    TrialRun,
    deploy_trial,
    simulate_trial,
)
from gllm.config.engine import EngineConfig
from gllm.models.config import read_config
from gllm.models.spec.attention import AttentionSpec
from gllm.observability.step_log import StepLogEvent
from gllm.runtime.emulation.deployment import build_emulated_deployment
from gllm.runtime.emulation.model_folder import prepare_emulated_model
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, simulate_scheduler_requests
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.support.full_cases import full_but
from tests.support.sim.requests import to_scheduler_requests

OPTIONS = ExperimentOptions(requests=8, quick=True, progress=False, jobs=1)
TRIAL = SimulationTrial(L20_32B, "azure-conv", "throttle", 2.0, 8)


class SimulatedEngines:
    """Simulated pipelines in place of engines; a step takes 10 ms of the emulated device."""

    def __init__(self, late_shares: Sequence[float] = (0.01,)) -> None:
        self.late_shares = cycle(late_shares)
        """Of one workload after another."""
        self.num_engines: list[int] = []
        """Of each call."""

    def __call__(self, groups: Sequence[LoadedEngine]) -> list[ServedWorkload]:
        """Serve the requests of engines that run together."""
        self.num_engines.append(len(groups))
        return [
            ServedWorkload(simulate_log(config, jobs), next(self.late_shares))
            for config, jobs in groups
        ]


def simulate_log(config: EngineConfig, jobs: list[WorkloadRequest]) -> list[StepLogEvent]:
    stages = config.pipeline_parallel_size
    scheduler = config.scheduler.resolve(stages, 10_000, MAX_MODEL_LEN)
    cost = ConstantCostModel(0.01 / config.emulation.emulated_speed)
    deployment = Deployment("simulated", [1] * stages, cost, scheduler)
    return simulate_scheduler_requests(deployment, to_scheduler_requests(jobs))[1]


def test_each_load_has_an_engine_of_its_own() -> None:
    engines = SimulatedEngines()
    trials = [
        replace(TRIAL, policy=policy, rate=rate)
        for rate in (1.0, 2.0)
        for policy in ("throttle", "sarathi", "prefill-first", "balance")
    ]
    served = serve_trials(trials, progress=False, serve=engines)
    assert engines.num_engines == [ENGINES, ENGINES, 2]
    assert [each.run.trial for each in served] == trials
    assert all(len(each.run.record.requests) == 8 for each in served)


@given(
    st.lists(st.builds(EngineLoad, st.floats(0, 1e3), st.floats(0, 1)), max_size=20),
    st.integers(1, ENGINES),
)
def test_engines_run_together_within_their_load(loads: list[EngineLoad], usual: int) -> None:
    groups = group_engines(loads, usual)
    assert sorted(index for group in groups for index in group) == list(range(len(loads)))
    for group in groups:
        cores = sum(loads[index].cores for index in group)
        assert len(group) <= usual or (len(group) <= MAX_ENGINES and cores <= MAX_CORES * 1.001)
    for longer, shorter in pairwise(groups):
        least = min(loads[index].seconds for index in longer)
        assert least >= max(loads[index].seconds for index in shorter)
        # The next engine had no room.
        cores = sum(loads[index].cores for index in (*longer, shorter[0]))
        assert len(longer) == MAX_ENGINES or (len(longer) >= usual and cores > MAX_CORES)


def test_a_slower_emulation_is_a_lighter_load() -> None:
    run = TrialRun(TRIAL, simulate_trial(TRIAL))
    fast, slow = estimate_load(run), estimate_load(run, 0.5)
    assert slow == pytest.approx((2 * fast.seconds, fast.cores / 2))
    assert fast.seconds > 0
    assert fast.cores > 0


def test_equal_trials_are_served_once() -> None:
    engines = SimulatedEngines()
    # The default of a field.
    trials = [TRIAL, replace(TRIAL, options=(("prefill_iterations", 8),))]
    first, second = serve_trials(trials, progress=False, serve=engines)
    assert engines.num_engines == [1]
    assert first.run.record is second.run.record
    assert second.run.trial == trials[1]


def test_late_trials_are_served_once_more() -> None:
    engines = SimulatedEngines([0.5, 0.01, 0.5, 0.01, 0.3])
    base = replace(TRIAL, arrivals="static", requests=2)
    trials = [replace(base, policy=policy) for policy in ("throttle", "sarathi", "balance")]
    served = serve_trials(trials, progress=False, serve=engines)
    assert engines.num_engines == [3, 1, 1]
    assert [each.late_share for each in served] == [0.01, 0.01, 0.3]
    assert [each.is_valid for each in served] == [True, True, False]
    simulated = [TrialRun(trial, simulate_trial(trial)) for trial in trials]
    table = emulated.comparison_table(simulated, served, OPTIONS)
    assert [("invalid" in row, "/ -" in row) for row in table.splitlines()[2:]] == [
        (False, False),
        (False, False),
        (True, True),
    ]
    lateness, *differences = emulated.fidelity_claims(simulated, served)
    assert lateness.shown == "30.0 % (1 of 3 trials are invalid)"
    assert not any("balance" in claim.note for claim in differences)


def test_claims_on_an_invalid_trial_are_not_judged() -> None:
    base = replace(TRIAL, requests=2)
    trials = [replace(base, policy=policy) for policy in ("throttle", "sarathi")]
    simulated = [TrialRun(trial, simulate_trial(trial)) for trial in trials]
    engines = SimulatedEngines([0.01, 0.5, 0.5])
    served = serve_trials(trials, progress=False, serve=engines)
    names = [trial.policy for trial in trials]
    experiment = emulated.EmulatedExperiment(
        "test",
        lambda options: trials,
        lambda runs, policy: [
            PaperClaim(name, ExpectedLimit(9.0), run.figures["e2el"]["mean"])
            for name, run in zip(names, runs, strict=True)
        ],
    )
    first, second = emulated.make_claims(experiment, simulated, served, "throttle")
    assert first.ours == served[0].run.figures["e2el"]["mean"]
    assert second.shown == emulated.LATE
    assert second.verdict.is_met is None


def test_times_are_those_of_the_device_at_every_speed() -> None:
    # Workers report step times at intervals of the host, on which the policy must not depend.
    trial = replace(TRIAL, policy="throttle-paper")
    (slow,), (fast,) = (
        serve_trials([trial], speed, progress=False, serve=SimulatedEngines()) for speed in (1, 4)
    )
    for name in ("ttft", "tpot", "e2el"):
        assert fast.run.figures[name]["mean"] == pytest.approx(slow.run.figures[name]["mean"])
    assert fast.run.figures["bubble_share"] == pytest.approx(slow.run.figures["bubble_share"])
    last = max(job.arrival_seconds for job in make_workload("azure-conv", 8, 2.0))
    run = fast.run.record
    arrivals = [served.line.arrival for served in run.requests.values()]
    assert max(arrivals) - min(arrivals) == pytest.approx(last, abs=1)


@pytest.mark.parametrize("kv_share", [1.0, 0.25])
def test_an_engine_is_what_its_trial_simulates(kv_share: float) -> None:
    trial = replace(TRIAL, kv_share=kv_share, options=(("prefill_iterations", 3),))
    config, deployment = trial_config(trial, 2.0), deploy_trial(trial)
    model = read_config(prepare_emulated_model(config.model)).model
    served = build_emulated_deployment(config, model, MAX_MODEL_LEN)
    assert config.emulation.emulated_speed == 2.0
    assert config.scheduler.prefill_iterations == 3
    assert served.layers == deployment.layers
    num_blocks = served.scheduler.num_blocks
    if kv_share < 1:
        assert config.kv_cache_memory is not None
        attention = model.layers[0].attention
        assert isinstance(attention, AttentionSpec)
        # Keys and values in bfloat16.
        width = 2 * 2 * attention.num_kv_heads * attention.head_dim * model.num_layers
        num_blocks = config.kv_cache_memory // (width * config.scheduler.block_size)
    assert num_blocks == deployment.scheduler.num_blocks


@pytest.mark.parametrize("name", full_but(("volatility",), emulated.EMULATED))
def test_pages(name: str, tmp_path: Path) -> None:
    result = emulated.run(name, OPTIONS, 2.0, SimulatedEngines([0.5]))
    text = write_result(result, name, "gllm", tmp_path).read_text()
    assert "Limits of " in text
    assert "2 times their speed" in text
    assert "GB/s" in text
    (late,) = (claim for claim in result.claims if "lateness" in claim.quantity)
    assert late.verdict.is_met is False
    assert f"{late.quantity} (50.0 %" in text.partition("Missed: ")[2]
    # Every trial is late, so nothing is judged and no emulated figure is shown.
    assert result.claims[-1] == late
    assert not any(claim.verdict.is_met for claim in result.claims)
    assert emulated.LATE in text
    rows = [line for line in text.splitlines() if "/ -" in line]
    assert len(rows) == text.count("**50, invalid**") > 0


def test_every_emulated_experiment_is_known() -> None:
    assert set(EMULATED) == {*emulated.EMULATED, "planners", "interference"}


def test_only_some_experiments_are_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tetri", "--emulated"]) == 2
    assert "--emulated supports latency-vs-rate" in capsys.readouterr().err


def test_claims_have_the_figures_of_others_beside_them() -> None:
    claims = [PaperClaim("a", ExpectedLimit(0.5), 0.6), PaperClaim("b", "a plot", None, "1.00 x")]
    others = {"simulated": [replace(claims[0], ours=0.4), replace(claims[1], note="2.00 x")]}
    first, second = join_claims(claims, others)
    table = claims_table([first, second, PaperClaim("c", "none", None, "3")], "emulated")
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines())
    assert header[3:5] == ["emulated", "simulated"]
    assert [row[3:5] for row in rows] == [["60.0 %", "40.0 %"], ["1.00 x", "2.00 x"], ["3", "-"]]
    assert emulated.name_misses([first, second]).endswith(f"Missed: a ({first.shown}).")
    assert "No claim" in emulated.name_misses([second])


def test_differences_from_the_simulation() -> None:
    trials = [TRIAL, replace(TRIAL, rate=1.0)]
    served = serve_trials(trials, progress=False, serve=SimulatedEngines())
    simulated = [each.run for each in served]
    claims = emulated.fidelity_claims(simulated, served)
    assert all(claim.verdict.is_met for claim in claims)
    slower = [TrialRun(trial, simulate_trial(trial)) for trial in trials]
    assert any(not claim.verdict.is_met for claim in emulated.fidelity_claims(slower, served))


def test_two_machines(tmp_path: Path) -> None:
    links = []

    def serve_nodes(trial: SimulationTrial, link: str) -> two_nodes.NodesRun:
        links.append(link)
        return two_nodes.NodesRun(simulate_trial(trial))

    result = two_machines.run(OPTIONS, SimulatedEngines(), serve_nodes)
    assert links == ["25gbit+0.05ms"]
    text = write_result(result, "two-machines", "gllm", tmp_path).read_text()
    for part in (
        "a driver without cost",
        "25 Gbit/s",
        "predicted time",
        "the runtime (emulated)",
        "gllm-link",
    ):
        assert part in text
    gain = result.claims[0]
    assert gain.quantity == "throttle-paper: tokens/s of two machines over one"
    assert gain.ours is not None
    assert gain.verdict.is_met == (gain.ours >= two_nodes.MIN_GAIN)


def test_two_nodes(tmp_path: Path) -> None:
    trials: list[SimulationTrial] = []

    def serve(trial: SimulationTrial, link: str) -> two_nodes.NodesRun:
        trials.append(trial)
        return two_nodes.NodesRun(simulate_trial(trial), 0.03)

    result = two_nodes.run(OPTIONS, serve)
    text = write_result(result, "two-nodes", "gllm", tmp_path).read_text()
    assert [dict(trial.options).get("max_in_flight") for trial in trials] == [16, 4]
    assert text.count("depth controller ") == 2
    assert [claim.quantity.partition(":")[0] for claim in result.claims] == [
        "depth controller",
        "--max-in-flight 4 --lanes 1",
        "largest lateness of a run, over the time of its steps",
        "25gbit+0.05ms",
        "25gbit+0.05ms",
    ]
    assert not result.claims[2].verdict.is_met
    assert "two lanes" in text


def test_lateness_of_two_nodes() -> None:
    metrics = """\
# HELP gllm:emulation_late_seconds_total help
gllm:emulation_late_seconds_total{model_name="m",stage="0"} 0.25
gllm:emulation_late_seconds_total{model_name="m",stage="1"} 0.5
gllm:stage_busy_seconds_total{model_name="m",stage="0"} 20.0
gllm:stage_busy_seconds_total{model_name="m",stage="1"} 10.0
"""
    assert two_nodes.read_late_share(metrics) == 0.025


def test_flags_of_two_nodes() -> None:
    trial = replace(TRIAL, options=(("max_num_seqs", 512),))
    flags = two_nodes.engine_flags(trial)
    pairs = dict(zip(flags[::2], flags[1::2], strict=True))
    assert pairs["--device"] == "emulated:L20"
    assert pairs["--pp"] == "4"
    assert pairs["--max-num-seqs"] == "512"
    assert pairs["--policy"] == "throttle"
    command = two_nodes.load_command(trial)
    assert command[command.index("--num-prompts") + 1] == "8"
