"""Memory pressure: when a tier rests, and the kernel's files."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gllm.transport.kv.memory_pressure import (
    HIGH_PERCENT,
    LOW_PERCENT,
    PressureGate,
    read_memory_pressure,
)

LINES = "some avg10=80.00 avg60=1.00 avg300=0.00 total=9\nfull avg10={} avg60=2.0 total=7\n"


@given(st.lists(st.floats(0, 100), min_size=1))
def test_a_gate_changes_at_its_limits_alone(percents: list[float]) -> None:
    gate = PressureGate()
    decisions = [False, *map(gate.update, percents)]
    for percent, (before, after) in zip(percents, pairwise(decisions), strict=True):
        if percent >= HIGH_PERCENT:
            assert after
        elif percent < LOW_PERCENT:
            assert not after
        else:
            assert after == before


def test_the_highest_pressure_of_all_files_counts(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("machine", "container", "missing", "damaged")]
    paths[0].write_text(LINES.format("3.25"))
    paths[1].write_text(LINES.format("12.50"))
    paths[3].write_text("full avg10\n")
    assert read_memory_pressure(paths[:1]) == 3.25
    assert read_memory_pressure(paths) == 12.5
    assert read_memory_pressure(paths[2:]) == 0.0
