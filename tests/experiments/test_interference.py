"""Micro-batches of the interference experiment, simulated and read off a step log."""

from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.interference import (
    PREDICTED_PROMPTS,
    TETRI,
    InterferencePlan,
    MixedStep,
    interference_claims,
    predictor_seconds,
    predictor_section,
    simulate_steps,
)
from experiments.real_interference import DECODE_TOKENS, StepMeasurement
from gllm.observability.step_log import StepLogEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.roofline import RooflineCostModel
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.hardware.stages import build_hardware
from gllm.sim.workloads.requests import WorkloadRequest

PLAN = InterferencePlan(
    light_peers=(1,),
    heavy_peers=(1,),
    decode_batches=(1, 4),
    prompts=(18, 512),
    mixed_batch=4,
    heavy_shares=(0.0, 0.5),
)


def test_steps_slow_each_other_down() -> None:
    plan = InterferencePlan()
    times = simulate_steps(TETRI, plan)
    assert set(times) == set(plan.all_steps())
    alone = times[plan.light_step(0, 0)]
    assert alone < times[plan.light_step(7, 0)] < times[plan.light_step(63, 0)]
    for prompt in plan.prompts:
        for batch in plan.decode_batches:
            together = times[plan.mixture(prompt, batch)]
            apart = times[MixedStep((prompt,))], times[plan.decodes(batch)]
            assert max(apart) < together < sum(apart)  # Weights are read once for both.
    speeds = [batch / times[plan.decodes(batch)] for batch in plan.decode_batches]
    assert speeds == sorted(speeds)


def test_claims_compare_with_the_paper() -> None:
    plan = InterferencePlan()
    claims = interference_claims("opt-13b", simulate_steps(TETRI, plan), plan)
    assert len(claims) == 7
    by_name = {claim.quantity: claim.verdict for claim in claims}
    assert by_name["opt-13b: light prefill beside 63 light"].is_met
    assert all(verdict.same_sign is not False for verdict in by_name.values())


def test_times_are_read_by_composition() -> None:
    cost = RooflineCostModel(build_hardware("opt-13b", "A100-80G", 1))
    config = SchedulerConfig(policy="sarathi", max_num_batched_tokens=8192, prefix_cache=False)
    deployment = Deployment("opt-13b", [40], cost, config.resolve(1, 1000, 2048))
    # Decodes at first, then a prompt that arrives while a step of theirs is computed.
    jobs = [WorkloadRequest(0.0, 64, DECODE_TOKENS)] * 4 + [WorkloadRequest(0.2, 512, 1)]
    events: list[StepLogEvent] = []
    simulate(deployment, jobs, events.append)
    times = StepMeasurement(PLAN).read_times(events)
    assert set(times) == {PLAN.decodes(4), PLAN.mixture(512, 4)}
    work = PLAN.mixture(512, 4).stage_work()
    assert times[PLAN.mixture(512, 4)] == pytest.approx(cost.stage_seconds(0, work), rel=0.02)


@pytest.mark.long
def test_real_engine(tmp_path: Path) -> None:
    assert main(["interference", "--real", "--quick", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "interference-real.md").read_text()
    assert "demo, this machine" in page
    assert page.count("## ") == 5


@pytest.mark.long
def test_emulated_engine(tmp_path: Path) -> None:
    assert main(["interference", "--emulated", "--quick", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "interference-emulated.md").read_text()
    assert "(as TetriInfer), served" in page
    assert "largest difference of a served micro-batch from the simulated one" in page


def test_a_length_prediction_delays_the_prefill_by_its_own_time() -> None:
    seconds = [predictor_seconds(num_tokens) for num_tokens in PREDICTED_PROMPTS]
    assert 0 < seconds[0] <= seconds[-1]
    text, (latency, throughput) = predictor_section(10 * seconds[-1])
    assert latency.ours == pytest.approx(0.1)
    assert throughput.ours == pytest.approx(-1 / 11)
    assert latency.verdict.is_met
    assert "+10.0 %" in text
    _, (latency, _) = predictor_section(100 * seconds[-1])
    assert latency.verdict.is_met is False
