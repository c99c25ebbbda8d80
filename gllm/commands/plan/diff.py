"""`gllm plan diff plan.yaml STEP_LOG...`: how far a run is from what its plan expects.

Exit status: 0, 1 if a figure differs by more than --tolerance, 2 for files that cannot be used.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gllm.observability.step_log import StepLogEvent, read_step_log
from gllm.options.flags import FlagParser, number_type
from gllm.plan.plan_diff import (
    LoggedRun,
    compare_with_plan,
    find_exceeding_figures,
    format_figures,
    format_runs,
    read_engine_run,
)
from gllm.plan.serving_plan import PlanError, ServingPlan, read_plan


def make_parser() -> FlagParser:
    """Return the argument parser of `gllm plan diff`."""
    parser = FlagParser(
        prog="gllm plan diff",
        description="Compare what a plan expects with the step logs of its engines.",
    )
    parser.add_argument("plan", type=Path, help="plan.yaml")
    parser.add_argument(
        "logs",
        nargs="+",
        metavar="STEP_LOG",
        help="step log of an engine: ENGINE.jsonl, as `gllm up --step-logs` names it, or "
        "ENGINE=FILE",
    )
    parser.add_argument(
        "--tolerance",
        type=number_type(float, gt=0),
        help="exit with 1 if a figure differs by more than this share, such as 0.15",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the latencies and rates that a serving plan predicts next to those of step logs.

    Returns:
        The exit status: 1 if a value differs by more than `--tolerance`, 2 for unusable files.
    """
    arguments = make_parser().parse_args(argv)
    try:
        plan = read_plan(arguments.plan)
        runs = [_read_run(plan, text) for text in arguments.logs]
    except (ValueError, OSError) as error:
        print(f"gllm plan diff: {error}", file=sys.stderr)
        return 2
    figures = compare_with_plan(plan, runs)
    if arguments.json:
        names = ("name", "expected", "measured", "difference")
        rows = [{name: getattr(figure, name) for name in names} for figure in figures]
        print(json.dumps(rows, indent=1))
    else:
        print(format_figures(figures))
        print("\n" + format_runs(runs))
        if plan.expected:
            print(f"\nexpected by: {plan.expected.by}")
    if arguments.tolerance is None:
        return 0
    excess = find_exceeding_figures(figures, arguments.tolerance)
    if excess:
        text = f"more than {arguments.tolerance:.0%} from the plan: {', '.join(excess)}"
        print(f"gllm plan diff: {text}", file=sys.stderr)
    return 1 if excess else 0


def _read_run(plan: ServingPlan, text: str) -> LoggedRun:
    """Return the run of a step log. Raises ValueError or OSError."""
    name, equals, path = text.partition("=")
    if not equals or name not in plan.engines:
        name, path = "", text
    events = list(read_step_log(path))
    return read_engine_run(plan, name or _find_engine(plan, path, events), events)


def _find_engine(plan: ServingPlan, path: str, events: list[StepLogEvent]) -> str:
    """Return the engine of a step log, by its contents or its name. Raises PlanError."""
    candidates = [getattr(event, "engine", "") for event in events[:1]] + [Path(path).stem]
    if len(plan.engines) == 1:
        return next(iter(plan.engines))
    for name in candidates:
        if name in plan.engines:
            return str(name)
    raise PlanError(
        f"engines: {path} is named as none of {', '.join(plan.engines)}: write ENGINE={path}"
    )
