"""Plans that follow their workload: conditions, and the search for the one that was observed."""

import shlex
from pathlib import Path

import msgspec

from gllm.plan.plan_change import FLOW_PRESET
from gllm.plan.processes import find_flag
from gllm.plan.serving_plan import PlanError, ServingPlan
from gllm.plan.strategies import STRATEGIES

DETECTION_FLAG = "detect_shifts"
"""Flag of a router that detects shifts, with underscores."""
RATE_FLAGS = ("--rate", "--rat", "--ra")
"""Flag of the rate, and its abbreviations that no other flag has."""


def with_shift_detection(plan: ServingPlan) -> ServingPlan:
    """Return a copy of a plan whose router detects when the request lengths or rate change."""
    assert plan.router is not None
    others = {
        key: value
        for key, value in plan.router.flags.items()
        if key.replace("-", "_") != DETECTION_FLAG
    }
    router = msgspec.structs.replace(plan.router, flags=others | {DETECTION_FLAG: True})
    return msgspec.structs.replace(plan, router=router)


def make_search_command(
    plan: ServingPlan, workload: Path, rate: float, output: Path, budget_seconds: float
) -> list[str]:
    """Return `gllm` arguments that repeat the search which made a plan, for another workload.

    The flags are appended to the original command line, where later flags override earlier ones.
    `--rate` is added only if the original command has it.

    Args:
        plan: Plan of the running service, which contains the original command line.
        workload: CSV file with the observed prompt and output lengths.
        rate: Observed requests per second.
        output: File for the new plan.
        budget_seconds: Time limit of the search.

    Raises:
        PlanError: The plan was not made by a planner.
    """
    words = _planner_words(plan)
    flags = ["--workload", f"file:{workload}", "--budget", f"{budget_seconds:g}"]
    if _has_rate(words):
        flags += ["--rate", f"{rate:.6g}"]
    return [*words, *flags, "--output", str(output)]


def check_replannable(plan: ServingPlan) -> None:
    """Raise PlanError, which names the fix, if `gllm up --replan` cannot repeat a plan's search."""
    if plan.router is None:
        raise PlanError("router: none: --replan follows the workload that a router observes")
    if find_flag(plan.router.flags, "scale"):
        raise PlanError(
            "router.flags.scale: a router that scales decides itself how many engines run: remove "
            "it, or --replan"
        )
    if plan.router.preset == FLOW_PRESET:
        raise PlanError(
            f"router.preset: {FLOW_PRESET}: its flows are fixed when the router starts, so a new "
            "plan needs a new router: remove --replan, or make the plan by `gllm plan goodput` or "
            "`gllm plan search`, whose routers have no flows"
        )
    words = _planner_words(plan)
    takes_rate = STRATEGIES[words[1]].takes_rate
    if takes_rate and "--config" in words and not _has_rate(words):
        raise PlanError(
            "expected.by: --config may have the rate: pass --rate on the command line of the "
            "planner, so that it can be replaced"
        )


def _planner_words(plan: ServingPlan) -> list[str]:
    """Return the command that made a plan, without `gllm`."""
    by = plan.expected.by if plan.expected else ""
    try:
        words = shlex.split(by)
    except ValueError as error:
        raise PlanError(f"expected.by: {error}") from None
    repeatable = [name for name, strategy in STRATEGIES.items() if strategy.is_repeatable]
    if words[:2] != ["gllm", "plan"] or len(words) < 3 or words[2] not in repeatable:
        names = ", ".join(f"`gllm plan {name}`" for name in repeatable)
        raise PlanError(
            f"expected.by: {by!r}: --replan repeats the search that made the plan: make it by one "
            f"of {names}"
        )
    return words[1:]


def _has_rate(words: list[str]) -> bool:
    return any(word.partition("=")[0] in RATE_FLAGS for word in words)
