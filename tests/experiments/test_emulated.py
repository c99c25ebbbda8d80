"""Experiments on emulated devices, with simulated engines in place of the served ones."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import emulated, two_machines, two_nodes
from experiments.__main__ import EMULATED, main
from experiments.base import ExperimentOptions, write_result
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.emulated_trials import (
    ENGINES,
    ServedWorkload,
    Workloads,
    serve_trials,
    split_log,
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
from gllm.models.spec import AttentionSpec
from gllm.observability.step_log import StageTimesEvent, StepLogEvent
from gllm.runtime.emulation.deployment import build_emulated_deployment
from gllm.runtime.emulation.model_folder import prepare_emulated_model
from gllm.scheduler.plan import StepTime
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, simulate_scheduler_requests
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.support.full_cases import full_but
from tests.support.sim.requests import to_scheduler_requests

OPTIONS = ExperimentOptions(requests=8, quick=True, progress=False, jobs=1)
TRIAL = SimulationTrial(L20_32B, "azure-conv", "throttle", 2.0, 8)


class SimulatedEngines:
    """Simulated pipelines in place of engines; a step takes 10 ms of the emulated device."""

    def __init__(self, late_share: float = 0.01) -> None:
        self.late_share = late_share
        self.num_workloads: list[list[int]] = []
        """Of each engine of each call."""

    def __call__(
        self, groups: Sequence[tuple[EngineConfig, Workloads]]
    ) -> list[list[ServedWorkload]]:
        """Serve the workloads of engines that run together."""
        self.num_workloads.append([len(workloads) for _, workloads in groups])
        return [
            [ServedWorkload(simulate_log(config, jobs), self.late_share) for jobs in workloads]
            for config, workloads in groups
        ]


def simulate_log(config: EngineConfig, jobs: list[WorkloadRequest]) -> list[StepLogEvent]:
    stages = config.pipeline_parallel_size
    scheduler = config.scheduler.resolve(stages, 10_000, MAX_MODEL_LEN)
    cost = ConstantCostModel(0.01 / config.emulation.emulated_speed)
    deployment = Deployment("simulated", [1] * stages, cost, scheduler)
    return simulate_scheduler_requests(deployment, to_scheduler_requests(jobs))[1]


def test_trials_of_one_engine_share_it() -> None:
    engines = SimulatedEngines()
    trials = [
        replace(TRIAL, policy=policy, rate=rate)
        for rate in (1.0, 2.0)
        for policy in ("throttle", "sarathi", "prefill-first", "balance")
    ]
    served = serve_trials(trials, progress=False, serve=engines)
    assert engines.num_workloads == [[2] * ENGINES, [2]]
    assert [each.run.trial for each in served] == trials
    assert all(len(each.run.record.requests) == 8 for each in served)


def test_equal_trials_are_served_once() -> None:
    engines = SimulatedEngines()
    # The default of a field.
    trials = [TRIAL, replace(TRIAL, options=(("prefill_iterations", 8),))]
    first, second = serve_trials(trials, progress=False, serve=engines)
    assert engines.num_workloads == [[1]]
    assert first.run.record is second.run.record
    assert second.run.trial == trials[1]


def test_times_are_those_of_the_device_at_every_speed() -> None:
    (slow,), (fast,) = (
        serve_trials([TRIAL], speed, progress=False, serve=SimulatedEngines()) for speed in (1, 4)
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


def test_a_log_is_split() -> None:
    jobs = make_workload("azure-conv", 3, 2.0)
    later = [job._replace(arrival_seconds=job.arrival_seconds + 1000) for job in jobs[:2]]
    config = trial_config(TRIAL)
    start, *events = simulate_log(config, [*jobs, *later])
    report = StageTimesEvent(999.5, 0, [StepTime(0, 0.0, 0.01)])
    index = next(i for i, event in enumerate(events) if event.time >= 999)
    parts = split_log([start, *events[:index], report, *events[index:]], [0.0, 999.0])
    runs = [build_run_record(part) for part in parts]
    assert [len(run.requests) for run in runs] == [3, 2]
    assert all(not any(step.stage_times[0] is None for step in run.micro_batches) for run in runs)


@pytest.mark.parametrize("name", full_but(("volatility",), EMULATED))
def test_pages(name: str, tmp_path: Path) -> None:
    result = emulated.run(name, OPTIONS, 2.0, SimulatedEngines(late_share=0.5))
    text = write_result(result, name, "gllm", tmp_path).read_text()
    assert "Limits of " in text
    assert "2 times their speed" in text
    assert "GB/s" in text
    (late,) = (claim for claim in result.claims if "lateness" in claim.quantity)
    assert late.verdict.is_met is False
    assert f"{late.quantity} (50.0 %)" in text.partition("Missed: ")[2]
    judged = [claim for claim in result.claims if "simulated:" in claim.note]
    assert judged
    assert len(judged) + 5 == len(result.claims)


def test_every_emulated_experiment_is_known() -> None:
    assert set(EMULATED) == set(emulated.EMULATED)


def test_only_some_experiments_are_emulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tetri", "--emulated"]) == 2
    assert "--emulated supports latency-vs-rate" in capsys.readouterr().err


def test_claims_have_the_figures_of_others_beside_them() -> None:
    claims = [PaperClaim("a", ExpectedLimit(0.5), 0.6), PaperClaim("b", "a plot", None, "1.00 x")]
    others = {"simulated": [replace(claims[0], ours=0.4), replace(claims[1], note="2.00 x")]}
    first, second = emulated.join_claims(claims, others)
    assert first.shown == "60.0 % (simulated: 40.0 %)"
    assert second.shown == "1.00 x (simulated: 2.00 x)"
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

    def serve_nodes(trial: SimulationTrial, link: str) -> RunRecord:
        links.append(link)
        return simulate_trial(trial)

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

    def serve(trial: SimulationTrial, link: str) -> RunRecord:
        trials.append(trial)
        return simulate_trial(trial)

    result = two_nodes.run(OPTIONS, serve)
    text = write_result(result, "two-nodes", "gllm", tmp_path).read_text()
    assert [dict(trial.options).get("max_in_flight") for trial in trials] == [16, 4]
    assert text.count("depth controller ") == 2
    assert len(result.claims) == 2


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
