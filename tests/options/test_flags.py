"""Flags of numbers of every command: each has a range, and its error names flag and range."""

import argparse
import contextlib
import functools
import importlib
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.config.engine import EngineConfig
from gllm.config.server import ServerConfig
from gllm.options.flags import FlagParser, FlagType, number_type, parse_bytes
from gllm.options.options import INT32_MAX, Range, describe_range
from gllm.plan.strategies import STRATEGIES
from tests.support.examples import num_examples

PARSERS = {
    "serve": ("gllm.serve", "make_parser"),
    "profile": ("gllm.commands.profile.command", "make_parser"),
    "experiment": ("experiments.__main__", "make_parser"),
    "simulate": ("gllm.commands.simulate", "make_parser"),
    "bench serve": ("gllm.commands.bench.serve", "make_parser"),
    "bench throughput": ("gllm.commands.bench.throughput", "make_parser"),
    "bench latency": ("gllm.commands.bench.latency", "make_parser"),
    "top": ("gllm.commands.top.command", "make_parser"),
    "chat": ("gllm.commands.chat", "make_parser"),
    "node": ("gllm.commands.node", "make_parser"),
    "doctor": ("gllm.commands.doctor", "make_parser"),
}
PLANNERS = {f"plan {name}": (f"gllm.commands.plan.{name}", "make_parser") for name in STRATEGIES}
NAMES = {"experiment": ["slo"], "node": ["--join", "head"]}
"""Positional arguments that a command needs."""


@functools.cache
def make_parser(command: str) -> FlagParser:
    module, function = {**PARSERS, **PLANNERS}[command]
    made: Callable[[], FlagParser] = getattr(importlib.import_module(module), function)
    return made()


def numeric(command: str) -> Iterator[argparse.Action]:
    """The flags of a command that hold numbers."""
    for action in make_parser(command).flags:
        if action.type in (int, float) or getattr(action.type, "kind", None) is not None:
            yield action


def error_of(command: str, *arguments: str) -> str:
    """What a command line is refused with; empty where it is accepted."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        try:
            make_parser(command).parse_args([*NAMES.get(command, []), *arguments])
        except SystemExit as end:
            last = stderr.getvalue().strip().splitlines()[-1]
            return last if end.code == 2 else f"status {end.code}"
    return ""


def outside(flag: FlagType) -> st.SearchStrategy[str]:
    """Texts of numbers that are not in a flag's range, and of what is no number at all."""
    assert flag.range is not None
    assert flag.kind is not None
    allowed, parts = flag.range, []
    low = allowed.ge if allowed.ge is not None else allowed.gt
    high = allowed.le if allowed.le is not None else allowed.lt
    assert low is not None, "a range needs a lower bound"
    if flag.kind is int:
        parts.append(st.integers(max_value=math.ceil(low) - 1).map(str))
        if high is not None:
            parts.append(st.integers(min_value=math.floor(high) + 1).map(str))
        parts.append(st.sampled_from(["1.5", "1e3", "9" * 5000]))
    else:
        below: dict[str, Any] = {"max_value": float(low), "exclude_max": allowed.gt is None}
        parts.append(st.floats(allow_nan=False, allow_infinity=False, **below).map(repr))
        if high is not None:
            above: dict[str, Any] = {"min_value": float(high), "exclude_min": allowed.lt is None}
            parts.append(st.floats(allow_nan=False, **above).map(repr))
    words = ["nan", "-inf", "-nan", "", " ", "ten", "0x10", "1,", "--", "None"]
    words += [] if allowed.allows_inf else ["inf", "Infinity", "1e999"]
    return st.one_of(*parts, st.sampled_from(words))


def checked(action: argparse.Action) -> tuple[FlagType, str]:
    """The type of a flag of numbers, and its rule."""
    flag = action.type
    assert isinstance(flag, FlagType), f"{action.option_strings[0]} has no range"
    assert flag.range is not None, f"{action.option_strings[0]} has no range"
    assert flag.range.is_bounded
    assert flag.kind is not None
    return flag, describe_range(flag.kind, flag.range)


@pytest.mark.parametrize(
    "command",
    [
        # Their flags are of the same types, which `test_the_command_line_says_which_flag` checks.
        pytest.param(name, marks=[] if name == "serve" else [pytest.mark.full])
        for name in PARSERS
    ],
)
@settings(max_examples=num_examples(4, 60), deadline=None)
@given(data=st.data())
def test_values_out_of_range_are_refused(command: str, data: st.DataObject) -> None:
    for action in numeric(command):
        flag, rule = checked(action)
        with pytest.raises(argparse.ArgumentTypeError) as caught:
            flag(data.draw(outside(flag)))
        assert rule in str(caught.value)


@pytest.mark.parametrize("command", PARSERS)
def test_the_command_line_says_which_flag(command: str) -> None:
    for action in numeric(command):
        name = action.option_strings[0]
        flag, rule = checked(action)
        assert flag.range is not None
        error = error_of(command, f"{name}={'nan' if name == '--layers' else '-7'}")
        assert name in error
        assert rule in error
        for bound in (flag.range.ge, flag.range.le):
            assert bound is None or error_of(command, f"{name}={bound}") == ""


@pytest.mark.parametrize("command", [*PARSERS, *PLANNERS])
def test_help_states_defaults(command: str) -> None:
    parser = make_parser(command)
    for action in parser.flags:
        values = {"default": action.default, "prog": parser.prog}
        text = action.help % values if action.help else ""
        name = action.option_strings or action.dest
        assert text, f"{name} has no help"
        if action.default not in (None, True, False, "", (), [], argparse.SUPPRESS):
            assert "default" in text or str(action.default) in text, name


def test_there_are_such_flags() -> None:
    counts = [len(list(numeric(command))) for command in PARSERS]
    assert min(counts) > 0
    assert sum(counts) > 80


@pytest.mark.parametrize("text", ["infGiB", "nanMiB", "1e400kb", "GiB", "1.5", ""])
def test_bytes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (EngineConfig, {"threads": True}),
        (EngineConfig, {"threads": 2.0}),
        (EngineConfig, {"threads": "2"}),
        (EngineConfig, {"layers": (1.0,)}),
        (EngineConfig, {"gpu_memory_utilization": "0.5"}),
        (EngineConfig, {"health_timeout": math.inf}),
        (ServerConfig, {"port": 99999}),
        (ServerConfig, {"port": -1}),
        (ServerConfig, {"max_num_queued_requests": 0}),
        (ServerConfig, {"max_choices": -3}),
        (ServerConfig, {"shutdown_timeout": math.nan}),
    ],
)
def test_values_from_python_are_checked_alike(config: type, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name}(\[0\])? is .*has to be (an integer|a number)"):
        config(**options)


@pytest.mark.parametrize("value", ["no", 0, None])
def test_switches_are_true_or_false(value: Any) -> None:
    with pytest.raises(ValueError, match=r"prefix_cache is .* has to be True or False"):
        EngineConfig.from_options("demo", prefix_cache=value)


def test_other_types_of_numbers_are_converted() -> None:
    np = pytest.importorskip("numpy")
    config = EngineConfig(threads=np.int32(2), health_timeout=5)
    assert type(config.threads) is int
    assert type(config.health_timeout) is float


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        (Range(ge=0, le=65535), "in [0, 65535]"),
        (Range(ge=1, le=INT32_MAX), "in [1, 2^31 - 1]"),
        (Range(gt=0, lt=0.5), "in (0, 0.5)"),
        (Range(gt=0, allows_inf=True), "> 0"),
        (Range(ge=0, le=1e8), "in [0, 1e+08]"),
    ],
)
def test_ranges_in_words(allowed: Range, text: str) -> None:
    assert str(allowed) == text
    assert describe_range(int, allowed) == f"an integer {text}"


def test_a_flag_of_one_number() -> None:
    assert number_type(int, ge=1, le=3)("2") == 2
