"""`gllm plan NAME`: find machines, parallelism and routes for a model and a workload."""

import importlib
import sys
import time
from collections.abc import Callable

from gllm.plan.strategies import STRATEGIES, UnservableError

REPORTS = {"diff": "compare what a plan expects with the step logs of its engines"}
"""Commands that read plans: descriptions by the name of their module, which has `main`."""


def usage() -> str:
    """Return the help text of `gllm plan`, with all planners."""
    texts = {name: strategy.description for name, strategy in STRATEGIES.items()}
    lines = [f"  {name:12}{text}" for name, text in {**texts, **REPORTS}.items()]
    end = "`gllm plan NAME --help` lists the arguments of a planner."
    return "\n".join(["usage: gllm plan NAME [ARGUMENTS]", "", *lines, "", end])


def main(argv: list[str]) -> int:
    """Run `gllm plan NAME`, the planner or report that the first argument names.

    Without arguments the help text is printed.

    Returns:
        Its exit status; 2 for an unknown name.
    """
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name in REPORTS:
        return int(importlib.import_module(f"gllm.commands.plan.{name}").main(argv[1:]))
    if name in STRATEGIES:
        return run_strategy(name, argv[1:])
    print(f"gllm plan: unknown planner {name!r}\n\n{usage()}", file=sys.stderr)
    return 2


def run_strategy(name: str, argv: list[str], clock: Callable[[], float] = time.monotonic) -> int:
    """Run a planner, which prints its result, and write its serving plan to `--output`.

    The time of `--budget` begins with the call: the imports of the planner are a part of it.

    Args:
        name: name of the planner, such as capacity.
        argv: its command line.
        clock: returns the seconds that the budget counts, the same in all processes of the planner.

    Returns:
        The exit status: 1 if no deployment serves the workload, 2 for invalid input.
    """
    begin = clock()
    strategy = importlib.import_module(f"gllm.commands.plan.{name}")
    values = strategy.make_parser().parse_args(argv)
    values.clock, values.begin = clock, begin
    try:
        if values.checkpoint and not values.output:
            raise ValueError("--checkpoint: it is the model of a written plan: add --output")
        # Its imports are a part of the budget.
        output = importlib.import_module("gllm.commands.plan.output") if values.output else None
        lay_out = strategy.plan(values)
        if lay_out is None:
            return 1
        if output is not None:
            output.write_checked_plan(lay_out(), values, ["gllm", "plan", name, *argv])
    except BrokenPipeError:
        raise  # The reader of the table has gone, which is no error: see gllm/__main__.py.
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"gllm plan {name}: {error}", file=sys.stderr)
        return 1 if isinstance(error, UnservableError) else 2
    return 0
