"""Work and memory of Python code, counted so that the same code always has the same figures."""

import pickle
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def count_lines(function: Callable[[], object], folder: str = "") -> int:
    """Return the number of lines of Python that a call executes.

    Args:
        function: the call.
        folder: only lines of files whose path contains this text count; empty for all.
    """
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        if event == "call" and folder not in frame.f_code.co_filename:
            return None
        num_lines += event == "line"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(previous)
    return num_lines


def count_all_calls(function: Callable[[], object]) -> Counter[CodeType]:
    """Return the number of calls of each Python function during a call, by its code object.

    Functions that generated code defines, such as those of dataclasses, are counted as well.
    """
    counts: Counter[CodeType] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            counts[frame.f_code] += 1

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return counts


def count_calls(function: Callable[[], object], targets: dict[str, Any]) -> Counter[str]:
    """Return how often a call runs each of some functions.

    Args:
        function: the call.
        targets: functions of Python or C by the names of their counts.
    """
    names = {getattr(each, "__code__", each): name for name, each in targets.items()}
    counts: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        key = {"call": frame.f_code, "c_call": argument}.get(event)
        if key is not None and key in names:
            counts[names[key]] += 1

    previous = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return counts


def held_bytes(value: object) -> int:
    """Return a size that grows with all that an object holds."""
    return len(pickle.dumps(value))
