"""Errors of whole steps against Vidur's and Splitwise's measurements."""

from importlib.util import find_spec
from statistics import fmean

import pytest

from gllm.sim.costs.roofline import DeviceEfficiency
from scripts.roofline_error import layer_error, read_layer_times
from scripts.step_error import (
    MACHINES,
    mean_error,
    predictor,
    prefill_work,
    splitwise_errors,
    splitwise_hardware,
    splitwise_mean,
    splitwise_steps,
    table_iv_rows,
    vidur_errors,
)


def test_layers_of_vidur_are_within_six_percent() -> None:
    """Token-level operators: three devices, five models, up to eight ranks, the same constants."""
    layers = read_layer_times()
    assert {key[0] for key in layers} == {"A100-80G", "A40", "H100"}
    assert {key[2] for key in layers} == {1, 2, 4, 8}
    errors = [layer_error(key, times, DeviceEfficiency()) for key, times in layers.items()]
    assert fmean(errors) <= 0.06
    assert max(errors) <= 0.10


def test_steps_of_splitwise_are_the_measured_ones() -> None:
    """Thirteen configurations of each machine; those beyond the memory of two GPUs are left out."""
    steps = splitwise_steps()
    assert len(steps) == 2 * (2 * (11 + 13 + 13) + 2 * 13)
    (prefill,) = (
        step
        for step in steps
        if (step.model, step.device, step.tp) == ("llama2-70b", "a100-80gb", 2)
        and step.work == prefill_work(1, 4096)
    )
    assert prefill.seconds == 1.485


def test_whole_steps_of_splitwise_are_within_a_fifth() -> None:
    """The same constants for all numbers of ranks, and also if all hosts were alike."""
    errors = splitwise_errors()
    for kind in ("prefill", "decode"):
        assert splitwise_mean(errors, kind=kind) <= 0.20
    assert splitwise_mean(errors) <= 0.15
    assert splitwise_mean(errors, tps=(4,)) <= 0.16
    assert splitwise_mean(errors, "bloom-176b") <= 0.22
    same_host = dict.fromkeys(MACHINES, DeviceEfficiency().launch_seconds)
    assert splitwise_mean(splitwise_errors(launch_seconds=same_host)) <= 0.20


def test_each_part_of_a_step_is_needed() -> None:
    """With sums at the speed that they have alone, and free launches, decodes are too fast."""
    without = splitwise_errors(DeviceEfficiency(collective=1.0), dict.fromkeys(MACHINES, 0.0))
    for device in MACHINES:
        assert fmean(without["llama2-70b", device, 8, "decode"]) < -0.4
    assert splitwise_mean(without) > 0.25


def test_more_ranks_do_not_pay_for_single_decodes() -> None:
    """Measured: a decode on eight A100s takes as long as on four, where the host is the limit."""
    seconds = [
        predictor(splitwise_hardware("llama2-70b", "a100-80gb", tp))(prefill_work(1, 1))
        for tp in (2, 4, 8)
    ]
    assert seconds[0] > 1.1 * seconds[1]
    assert seconds[2] == pytest.approx(seconds[1], rel=0.05)


def test_table_iv_is_shown_beside_the_roofline() -> None:
    rows = table_iv_rows()
    assert [row[:2] for row in rows[:2]] == [["coding", "A100-80G"], ["coding", "H100"]]
    ratios = [float(cell.split("(")[1].rstrip("%)")) for row in rows for cell in row[2:]]
    assert max(map(abs, ratios)) < 35


@pytest.mark.skipif(find_spec("sklearn") is None, reason="forests need scikit-learn")
def test_whole_steps_of_vidur_are_within_eight_percent() -> None:
    """Llama-2-70B on two A100s: prefills, decodes and mixed steps, by Vidur's own forests."""
    errors = vidur_errors()
    assert set(errors) == {"prefill", "decode", "mixed"}
    for each in errors.values():
        assert mean_error(each) <= 0.08
    assert mean_error([error for each in errors.values() for error in each]) <= 0.05
