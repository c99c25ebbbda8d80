"""Threshold of transfers during the prefill, by scripted measurements."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.__main__ import main
from experiments.kv_theta import TokenTimes, find_threshold, make_result
from experiments.transfer_mode import TransferMode

LENGTHS = (32, 64, 128, 256)


def script(
    rate: float, mode: TransferMode, lengths: Sequence[int], repeats: int
) -> dict[int, TokenTimes]:
    """A prefill of 1 ms per token, a link of rate / 0.01 tokens per ms; per layer: 70 ms more."""
    assert repeats == 5
    times = {}
    for length in lengths:
        first, transfer = length / 1e3, 0.01 / rate * length / 1e3
        if mode is TransferMode.PER_LAYER:
            first, transfer = first + 0.06, 0.01
        times[length] = TokenTimes(first, first + transfer)
    return times


@pytest.mark.parametrize(("rate", "shown"), [(0.01, "128"), (0.005, "64"), (1.0, "none up to 256")])
def test_thresholds_are_those_of_the_measurements(rate: float, shown: str) -> None:
    result = make_result(script, [rate], LENGTHS, 5)
    cells = [[cell.strip() for cell in line.split("|")] for line in result.text.splitlines()]
    assert ["", f"{rate:g}", shown, ""] in cells
    visible = f"{0.01 / rate * 256:.1f}"
    later = f"{70 - 0.01 / rate * 256:.1f}"
    assert ["", f"{rate:g}", "256", "256.0", "60.0", visible, "10.0", later, ""] in cells


def test_longer_prompts_have_to_gain_too() -> None:
    serialized = {length: TokenTimes(0.0, 1.0) for length in LENGTHS}
    gains = {32: 0.5, 64: 1.0, 128: 0.9, 256: 0.5}
    per_layer = {length: TokenTimes(0.0, second) for length, second in gains.items()}
    assert find_threshold(serialized, per_layer) == 128
    assert find_threshold(serialized, per_layer | {256: TokenTimes(0.0, 1.0)}) is None


@pytest.mark.long
def test_engines_of_this_machine_are_measured(tmp_path: Path) -> None:
    """The experiment itself checks that all prompts were pushed, or none."""
    assert main(["kv-theta", "--quick", "--output", str(tmp_path)]) == 0
    assert "theta, tokens" in (tmp_path / "kv-theta.md").read_text()
