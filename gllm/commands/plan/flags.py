"""Flags of planners that simulate and write a plan, and texts that their reports share."""

import argparse

from gllm.options.flags import FlagType, number_type, output_file
from gllm.options.slo import TARGET_ATTAINMENT
from gllm.plan.attainment import Attainment


def add_slo_flags(
    parser: argparse.ArgumentParser,
    help_text: str,
    default: str | None = None,
    attainment: float = TARGET_ATTAINMENT,
) -> None:
    """Add `--slo` (latency limits) and `--attainment` (share of requests that have to meet them).

    Args:
        parser: parser of a planner.
        help_text: help of `--slo`.
        default: default of `--slo`; None makes the flag required.
        attainment: default of `--attainment`.
    """
    parser.add_argument(
        "--slo", default=default, required=default is None, metavar="LIMITS", help=help_text
    )
    parser.add_argument(
        "--attainment",
        type=number_type(float, gt=0, le=1),
        default=attainment,
        help="share of requests that keep the limits of each request (default %(default)s)",
    )


def add_budget_flag(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--budget SECONDS`, the time limit of a search.

    Args:
        parser: parser of a planner.
        default: end of a search without the flag, as text for the help.
    """
    parser.add_argument(
        "--budget",
        metavar="SECONDS",
        type=number_type(float, gt=0, le=1e7),
        help=f"time of the command; default: {default}",
    )


def add_plan_flags(parser: argparse.ArgumentParser, num_requests: int) -> None:
    """Add `--requests`, `--seed`, `--budget`, `--checkpoint` and `--output`.

    Args:
        parser: parser of a planner with a flag `--model`.
        num_requests: default of `--requests`, the least number of requests of a simulation.
    """
    parser.add_argument(
        "--requests",
        type=number_type(int, ge=8, le=10**6),
        default=num_requests,
        help="least number of requests of a simulation (default %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=number_type(int, ge=0, le=2**63 - 1),
        default=0,
        help="seed of lengths and arrivals",
    )
    add_budget_flag(parser, "until nothing better can be found")
    add_output_flags(parser)


def add_output_flags(parser: argparse.ArgumentParser, model: str = "--model") -> None:
    """Add `--checkpoint` (model to serve) and `--output` (file of the serving plan).

    Args:
        parser: parser of a planner.
        model: model of the plan without `--checkpoint`, as text for the help.
    """
    parser.add_argument(
        "--checkpoint",
        metavar="MODEL",
        help=f"folder or hub name of the model in the plan; default: {model}",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=FlagType(output_file),
        help="write the best plan, for `gllm up`",
    )


def format_interval(attainment: Attainment) -> str:
    """Return the share of requests within the limits with its interval, and if it decides."""
    text = f"{attainment.share:.1%} ({attainment.low:.1%} to {attainment.high:.1%})"
    return text if attainment.is_met else f"{text}, {attainment.verdict}"
