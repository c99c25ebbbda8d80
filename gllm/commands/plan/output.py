"""File of a planner's serving plan: checked as `gllm serve` checks its engines, and written."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from gllm.engine.preflight import plan_local_model
from gllm.models.hub import find_folder
from gllm.plan.engine_checks import check_engines
from gllm.plan.processes import check_configurations, find_simulated_only
from gllm.plan.serving_plan import PlanError, ServingPlan, write_plan
from gllm.sim.hardware.shapes import MODELS


def write_checked_plan(
    plan: ServingPlan, values: argparse.Namespace, command: Sequence[str]
) -> None:
    """Check a plan and write it to `--output`.

    Args:
        plan: Plan of a planner.
        values: `output` and `checkpoint`.
        command: Words of the planner's command line.

    Raises:
        ValueError: An engine would be refused; the message says which, and what to change.
        OSError: The file cannot be written.
    """
    assert plan.expected is not None, "planners predict figures"
    expected = replace(plan.expected, by=plan.expected.by or shlex.join(command))
    plan = check_engines(replace(plan, expected=expected))
    plan = replace(plan, model=values.checkpoint or plan.model)
    _check_checkpoint(plan)
    plan = replace(plan, simulated_only=find_simulated_only(plan))
    write_plan(plan, Path(values.output))
    print(f"wrote {values.output}")
    if plan.simulated_only:
        print(f"simulated only: {plan.simulated_only}")


def _check_checkpoint(plan: ServingPlan) -> None:
    """Check the engines as `gllm serve` does before its workers start, if the model is here.

    Raises:
        ValueError: an engine would be refused; the message says which, and what to change.
    """
    folder = None if plan.model in MODELS else find_folder(plan.model, has_weights=False)
    if folder is None:
        return
    for name, config in check_configurations(plan).items():
        try:
            plan_local_model(config, folder)
        except ValueError as error:
            raise PlanError(f"gllm serve refuses engine {name}: {error}") from None
