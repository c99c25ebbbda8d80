"""Classes of requests: shares of a workload with a priority or an SLO class of their own."""

import math
import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from gllm.sim.workloads.requests import WorkloadRequest

Label = TypeVar("Label", int, str)


def parse_shares(text: str, flag: str = "--slo-classes") -> dict[str, float]:
    """Parse shares of classes such as `chat:0.9,batch:0.1` into a dict.

    Shares need not add up to 1.

    Args:
        text: Names and shares.
        flag: Command-line flag to name in error messages.

    Raises:
        ValueError: A class lacks a name or a share above 0, or occurs twice.
    """
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.rpartition(":")
        name = name.strip()
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not name or not 0 < share < math.inf or name in shares:
            raise ValueError(
                f"{flag} {text}: {part!r} has to be NAME:SHARE with a share above 0 and each name "
                "once, as in chat:0.9,batch:0.1"
            )
        shares[name] = share
    return shares


def parse_priorities(text: str) -> dict[int, float]:
    """Parse shares of request priorities such as `0:0.9,1:0.1` into a dict.

    Raises:
        ValueError: A priority is not a whole number, lacks a share above 0, or occurs twice.
    """
    priorities: dict[int, float] = {}
    for name, share in parse_shares(text, "--priorities").items():
        try:
            priorities[int(name)] = share
        except ValueError:
            raise ValueError(
                f"--priorities {text}: {name!r} has to be a whole number, as in 0:0.9,1:0.1"
            ) from None
    return priorities


def assign_classes(
    jobs: Sequence[WorkloadRequest],
    priorities: dict[int, float] | None = None,
    slo_classes: dict[str, float] | None = None,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Return requests with randomly assigned priorities and SLO classes.

    All requests of a conversation get the same ones.

    Args:
        jobs: The requests.
        priorities: Fraction of the requests by priority; None leaves the priorities as they are.
        slo_classes: Fraction of the requests by SLO class; None leaves the classes as they are.
        seed: Seed of the random numbers.
    """
    owners = [job.session or index for index, job in enumerate(jobs)]
    labelled = list(jobs)
    if priorities:
        ranks = sample_labels(owners, priorities, f"priorities {seed}")
        labelled = [job._replace(priority=rank) for job, rank in zip(labelled, ranks, strict=True)]
    if slo_classes:
        names = sample_labels(owners, slo_classes, f"slo classes {seed}")
        labelled = [job._replace(slo_class=name) for job, name in zip(labelled, names, strict=True)]
    return labelled


def sample_labels(
    owners: Sequence[str | int], shares: Mapping[Label, float], seed: str
) -> list[Label]:
    """Return a random label for each request; requests of one conversation get the same label.

    Args:
        owners: Conversation of each request, or the request's number if it belongs to none.
        shares: Relative frequency of each label.
        seed: Seed of the random numbers.
    """
    rng = random.Random(seed)
    labels, weights = list(shares), list(accumulate(shares.values()))
    chosen: dict[str | int, Label] = {}
    for owner in owners:
        if owner not in chosen:
            chosen[owner] = rng.choices(labels, cum_weights=weights)[0]
    return [chosen[owner] for owner in owners]
