"""DistServe's published coefficients as a cost model, against hand calculations."""

import pytest

from experiments.distserve_runs import RealRun, read_real_runs, simulate_run
from gllm.commands.simulate import main
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostRangeError, DecodeOnlyCostModel
from gllm.sim.costs.distserve import (
    DistServeCostModel,
    read_coefficients,
    read_kv_capacity,
)

PREFILL = StageWork(0, 500, ((0, 300), (0, 200)), 0, 0, 2)


def decodes(count: int, context: int) -> StageWork:
    """Return a step of decodes that attend to `context` tokens together."""
    return StageWork(0, count, (), count, context, count)


DECODE = decodes(10, 5000)


def test_a_prefill_and_a_decode_by_hand() -> None:
    """Row distserve, opt-13b, tp 1."""
    cost = DistServeCostModel(read_coefficients("distserve", "opt-13b", 1))
    prefill = 18.10254647486372 + 0.1019122572698738 * 500 + 7.122264314252114e-06 * 130_000
    assert cost.stage_seconds(0, PREFILL) == pytest.approx((prefill + 1) / 1e3)
    decode = 19.934702624895458 + 0.0006269356524350583 * 5000 + 0.03850697740828398 * 10
    assert cost.stage_seconds(0, DECODE) == pytest.approx((decode + 1) / 1e3)
    large = 7.1661889468253595 + 0.0005798000403396046 * 9500 + 0.15831096191764046 * 95
    batch = StageWork(0, 95, (), 95, 9500, 95)
    assert cost.stage_seconds(0, batch) == pytest.approx((large + 1) / 1e3)


def test_stages_share_the_time_and_add_a_constant_each() -> None:
    coefficients = read_coefficients("vllm", "opt-66b", 2)
    one, two = (DistServeCostModel(coefficients, stages) for stages in (1, 2))
    for work in (PREFILL, DECODE):
        expected = (one.stage_seconds(0, work) - 1e-3) / 2 + 2e-3
        assert two.stage_seconds(1, work) == pytest.approx(expected)


def test_chunks_add_up_to_the_prompt_and_both_phases_read_the_weights_once() -> None:
    coefficients = read_coefficients("distserve", "opt-13b", 2)
    cost = DistServeCostModel(coefficients)
    fixed = coefficients.prefill.constant / 1e3 + 1e-3
    whole = cost.stage_seconds(0, StageWork(0, 500, ((0, 500),), 0, 0, 1))
    parts = sum(
        cost.stage_seconds(0, StageWork(0, 250, (chunk,), 0, 0, 1)) - fixed
        for chunk in ((0, 250), (250, 250))
    )
    assert parts == pytest.approx(whole - fixed)
    mixed = StageWork(0, 510, PREFILL.prefill_chunks, 10, 5000, PREFILL.num_sampled_rows)
    both = cost.stage_seconds(0, PREFILL) + cost.stage_seconds(0, DECODE)
    smaller = min(coefficients.prefill.constant, coefficients.small_decode.constant)
    assert cost.stage_seconds(0, mixed) == pytest.approx(both - (smaller + 1) / 1e3)


def test_an_engine_whose_prompts_come_with_their_cache_only_decodes() -> None:
    cost = DecodeOnlyCostModel(DistServeCostModel(read_coefficients("distserve", "opt-13b", 1)))
    assert cost.stage_seconds(0, PREFILL) == 0
    assert cost.stage_seconds(0, DECODE) > 0.02


def test_negative_coefficients_count_as_nothing() -> None:
    coefficients = read_coefficients("distserve", "opt-175b", 8)
    assert coefficients.prefill.third == coefficients.small_decode.third == 0
    assert coefficients.large_decode.per_token == 0


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (decodes(193, 5000), "decodes is 193, but was measured from 1 to 192"),
        (
            decodes(10, 49_153),
            "decode context is 49153, but was measured from 4 to 49152",
        ),
        (
            StageWork(0, 50_000, ((0, 2000),) * 25, 0, 0, 25),
            "prefill tokens is 50000, but was measured from 4 to 49152",
        ),
        (
            StageWork(0, 9, ((2040, 9),), 0, 0, 1),
            "prompt length is 2049, but was measured from 4 to 2048",
        ),
    ],
)
def test_work_above_the_measured_batches_is_refused(work: StageWork, words: str) -> None:
    cost = DistServeCostModel(read_coefficients("distserve", "opt-13b", 1))
    with pytest.raises(CostRangeError, match=words):
        cost.stage_seconds(0, work)


def test_contexts_are_extrapolated_where_the_caller_says_so() -> None:
    coefficients = read_coefficients("distserve", "opt-13b", 1)
    cost = DistServeCostModel(coefficients, extrapolates_context=True)
    assert "decode context" not in cost.ranges
    times = [cost.stage_seconds(0, decodes(10, context)) for context in (40_000, 50_000, 60_000)]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])
    with pytest.raises(CostRangeError, match="decodes is 193"):
        cost.stage_seconds(0, decodes(193, 5000))


def test_work_below_the_measured_batches_costs_the_least_and_is_counted() -> None:
    cost = DistServeCostModel(read_coefficients("vllm", "opt-66b", 2))
    assert list(cost.ranges["decode context"]) == [4, 16 * 512]
    one, four = (StageWork(0, 1, (), 1, context, 1) for context in (1, 4))
    assert cost.stage_seconds(0, one) == cost.stage_seconds(0, four)
    assert cost.num_below_range == {"decode context": 1}
    # Its batches were not published.
    assert not DistServeCostModel(read_coefficients("vllm", "opt-66b", 8)).ranges


def test_what_was_not_published_is_named() -> None:
    with pytest.raises(ValueError, match=r"for system vllm, model opt-13b, tp 3: choose from .*tp"):
        read_coefficients("vllm", "opt-13b", 3)
    with pytest.raises(ValueError, match="model opt-66b, tp 1, pp 1"):
        read_kv_capacity("opt-66b", 1, 1)
    assert read_kv_capacity("opt-13b", 1, 1) == 66144


def test_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--workload", "fixed:200,20", "--requests", "20", "--rate", "2"]
    assert main(["--profile", "distserve:opt-13b,vllm", "--tp", "2", *load]) == 0
    capsys.readouterr()
    for flags, words in (
        (["--profile", "distserve:opt-13b,orca"], "'orca' is none of distserve, vllm"),
        (
            ["--profile", "distserve:opt-175b", "--tp", "8", "--workload", "fixed:2047,2"],
            "context of 2048 tokens, not 2049: cut the requests (--max-request-tokens 2048)",
        ),
        (["--profile", "distserve:opt-13b", "--max-model-len", "4096"], "2048 tokens, not 4096"),
        (["--profile", "distserve:opt-13b", "--tp", "5"], "published nothing for system distserve"),
        (["--profile", "distserve:gpt-5"], "model gpt-5"),
    ):
        assert main([*load, *flags]) == 2
        assert words in capsys.readouterr().err


def test_real_runs_are_predicted() -> None:
    """One calm run of each system; the page of the experiment has all of them."""
    runs = read_real_runs()
    assert (len(runs), sum(len(run.jobs) for run in runs)) == (37, 19_700)
    for system, layout, rate in (("vllm", "", 1.0), ("distserve", "c21d12", 4.0)):
        run = next(
            run for run in runs if (run.system, run.layout, run.rate) == (system, layout, rate)
        )
        predicted = simulate_run(RealRun(system, layout, rate, run.jobs[:100], run.real))
        for ours, real in ((predicted.ttft, run.real.ttft), (predicted.tpot, run.real.tpot)):
            middle = sorted(ours)[len(ours) // 2], sorted(real)[len(real) // 2]
            assert middle[0] == pytest.approx(middle[1], rel=0.3)
