"""Registry of planning strategies: the searches of `gllm plan`.

A strategy reads a `ServiceProblem` and returns engines that `layout.lay_out` makes a `ServingPlan`
of. Its module in `gllm.commands.plan` has the name of the strategy and two functions:

- `make_parser()` returns its flags, `--output` among them.
- `plan(values)` prints what the search finds and returns a function that lays out the plan, or None
  if nothing serves the workload. `gllm plan` adds the command and the checkpoint to the plan.
"""

from typing import NamedTuple


class Strategy(NamedTuple):
    """Registry entry of a planning strategy, which is a subcommand of `gllm plan`."""

    description: str
    is_repeatable: bool = False
    """True if `gllm up --replan` may repeat it for another workload."""
    takes_rate: bool = False
    """True if the strategy has a flag `--rate`, which a repetition sets to the new request rate."""


STRATEGIES: dict[str, Strategy] = {
    "goodput": Strategy(
        "engines of prefill and of decode with the highest goodput per GPU", True, True
    ),
    "pools": Strategy("prompt and token machines for a budget of power or cost, or for a rate"),
    "capacity": Strategy("highest request rate of a configuration within latency limits"),
    "search": Strategy(
        "devices, parallelism, policy and batch size that serve a workload best", True, True
    ),
    "scale": Strategy("GPUs per engine, and engines by request rate, within an SLO (Aladdin)"),
    "hetero": Strategy("prefill and decode replicas on unlike devices (HexGen-2)", True),
}


class UnservableError(ValueError):
    """Error: no configuration among a planner's choices serves the workload within its limits."""
