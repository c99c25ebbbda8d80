"""Samples of faults that were written by hand: each one can still be put into its file."""

from pathlib import Path

from scripts.mutation.__main__ import ROOT, SAMPLE, load_sample
from scripts.mutation.subjects import WRITTEN


def test_no_written_fault_is_stale() -> None:
    """A fault whose line is gone would have no verdict, without a word of the tests."""
    faults = load_sample(Path(SAMPLE).with_name("planners.json"))
    assert {fault.subject for fault in faults} == set(WRITTEN)
    stale = [
        fault.scope
        for fault in faults
        if (ROOT / fault.path).read_text(encoding="utf-8").count(fault.before) != 1
    ]
    assert stale == []
