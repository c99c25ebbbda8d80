"""Search for the cluster of prompt and token machines that is best under a constraint.

The caller evaluates a cluster, by simulation or by a formula. Each evaluation is made once, and the
searches make few of them: those under a budget assume that throughput has one peak along the
clusters that use up the budget; those at a throughput assume that more machines never harm.

Source: Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677), section on provisioning: a grid
over the numbers of prompt and token machines for each objective. For throughput the constraint is a
power or cost budget; for cost, power or space it is a throughput.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from gllm.sim.hardware.machines import ClusterDesign, MachineType, count_affordable
from gllm.sim.monotone_search import bisect_last

BUDGETS: dict[str, Callable[[ClusterDesign], float]] = {
    "cost": lambda design: design.cost,
    "power": lambda design: design.power,
    "machines": lambda design: float(design.num_machines),
}
"""Quantities that a cluster takes, by name: constraints of the searches for throughput, objectives
of the searches at a throughput."""


MAX_DOUBLINGS = 2
"""Doublings of a limit on machines: the tails of few machines' queues can take four times the
machines that the mean load needs."""


class DesignResult(NamedTuple):
    """Result of `maximize_throughput`: best cluster, its throughput, and number of evaluations."""

    design: ClusterDesign
    value: float
    """Throughput in requests per second."""
    num_evaluations: int


def maximal_designs(
    pair: tuple[MachineType, MachineType], constraint: str, budget: float
) -> Iterator[ClusterDesign]:
    """Yield the clusters that use up a budget: for each number of prefill machines the largest one.

    Args:
        pair: Types of the prefill and decode machines.
        constraint: Limited quantity: a name of BUDGETS, such as power.
        budget: Limit, relative to one DGX-A100, or a number of machines.
    """
    unit = BUDGETS[constraint]
    prompt_price = unit(ClusterDesign(*pair, 1, 0))
    token_price = unit(ClusterDesign(*pair, 0, 1))
    for num_prompt in range(1, count_affordable(budget, prompt_price) + 1):
        num_token = count_affordable(budget - num_prompt * prompt_price, token_price)
        if num_token:
            yield ClusterDesign(*pair, num_prompt, num_token)


def maximize_throughput(
    pair: tuple[MachineType, MachineType],
    constraint: str,
    budget: float,
    evaluate: Callable[[ClusterDesign], float],
) -> DesignResult:
    """Search for the prefill and decode machines within a budget that serve the highest rate.

    Clusters that use up the budget are compared by a Fibonacci search over the number of prefill
    machines, and then around the best one. The result is optimal if throughput first strictly rises
    and then never rises with this number. Among equals the fewest prefill machines win.

    Args:
        pair: Types of the prefill and decode machines.
        constraint: Limited quantity: a name of BUDGETS, such as power.
        budget: Limit, relative to one DGX-A100, or a number of machines.
        evaluate: Returns the requests per second that a cluster serves within the SLOs.

    Raises:
        ValueError: The budget does not allow one machine of each type.
    """
    designs = list(maximal_designs(pair, constraint, budget))
    if not designs:
        raise ValueError(
            f"a {constraint} budget of {budget:g}: choose a budget for one {pair[0].name} and one "
            f"{pair[1].name} at least"
        )
    evaluated = cache(evaluate)

    def value(index: int) -> float:
        return evaluated(designs[index])

    best = _climb(value, _search_peak(value, len(designs)), len(designs))
    return DesignResult(designs[best], value(best), evaluated.cache_info().currsize)


def _search_peak(value: Callable[[int], float], size: int) -> int:
    """Return the index of the only peak of a function on 0..size - 1, by Fibonacci numbers.

    Both probes of an interval divide it so that one of them is a probe of the next interval.
    """
    small, large = 1, 1
    while small + large - 1 < size:
        small, large = large, small + large
    first = 0
    while small + large > 2:
        left, right = first + small - 1, first + large - 1
        # Indices from `size` on are beyond every cluster.
        if right >= size or left == right or value(left) >= value(right):
            large, small = small, large - small
        else:
            first += small
            large, small = small, large - small
    return first


def _climb(value: Callable[[int], float], index: int, size: int) -> int:
    """Return the top beside an index, walking while a neighbour is at least as good."""
    while True:
        around = [neighbour for neighbour in (index - 1, index, index + 1) if 0 <= neighbour < size]
        best = max(around, key=lambda neighbour: (value(neighbour), -neighbour))
        if best == index:
            return index
        index = best


def find_smallest_clusters(
    pair: tuple[MachineType, MachineType],
    serves: Callable[[ClusterDesign], bool],
    limit: tuple[int, int],
    num_doublings: int = MAX_DOUBLINGS,
) -> tuple[list[ClusterDesign], int]:
    """Search for the smallest clusters of prefill and decode machines that serve a throughput.

    For each number of prefill machines, finds the fewest decode machines. Goes along the border
    between clusters that serve the throughput and those that do not, with at most as many
    evaluations as the sum of both limits, and one per doubling.

    Args:
        pair: Types of the prefill and decode machines.
        serves: Returns True if a cluster serves the throughput within the SLOs.
        limit: Largest numbers of prefill and decode machines.
        num_doublings: How often both limits may be doubled, until the largest cluster serves it.

    Returns:
        The clusters, those with the most prefill machines first, and the number of evaluations.

    Raises:
        ValueError: The largest cluster does not serve the throughput.
    """
    is_served = cache(serves)
    for _ in range(num_doublings):
        if is_served(ClusterDesign(*pair, *limit)):
            break
        limit = 2 * limit[0], 2 * limit[1]
    num_prompt, num_token = limit[0], 1
    border = []
    while num_prompt >= 1 and num_token <= limit[1]:
        design = ClusterDesign(*pair, num_prompt, num_token)
        if is_served(design):
            border.append(design)
            num_prompt -= 1
        else:
            num_token += 1
    if not border:
        raise ValueError(
            f"{limit[0]} prompt and {limit[1]} token machines do not serve the throughput: raise "
            "the limit"
        )
    return border, is_served.cache_info().currsize


def find_cheapest_cluster(
    pair: tuple[MachineType, MachineType],
    serves: Callable[[ClusterDesign], bool],
    objective: str,
    least: tuple[int, int],
    most: tuple[int, int],
    start: ClusterDesign | None = None,
) -> ClusterDesign | None:
    """Search for the cheapest cluster of prefill and decode machines that serves a throughput.

    More machines are assumed never to harm. For each number of decode machines, only numbers of
    prefill machines are tried with which the cluster is cheaper than the best one so far. The first
    of these is the largest one, the others are a bisection; few numbers of decode machines are left
    if `least` is close to what is needed.

    Args:
        pair: Types of the prefill and decode machines.
        serves: Returns True if a cluster serves the throughput within the SLOs.
        objective: Quantity to minimize: a name of BUDGETS.
        least: Numbers of prefill and decode machines without which none does.
        most: Largest numbers of prefill and decode machines.
        start: A cluster that serves the throughput; None if none is known.

    Returns:
        The cluster; None if none of up to `most` machines serves the throughput.
    """
    unit, is_served = BUDGETS[objective], cache(serves)

    def cost(num_prompt: int, num_token: int) -> float:
        return round(unit(ClusterDesign(*pair, num_prompt, num_token)), 9)

    best, (num_prompt, num_token) = start, least
    if best is None:
        if not is_served(ClusterDesign(*pair, *most)):
            return None
        largest_row = ClusterDesign(*pair, *most)
        num_token += bisect_last(
            lambda more, *_: not is_served(largest_row._replace(num_token=least[1] + more)),
            -1,
            most[1] - least[1],
        )
        num_token += 1
    while num_token <= most[1]:
        largest = most[0]
        if best is not None:
            limit = unit(best)
            if cost(num_prompt, num_token) >= round(limit, 9):
                break
            affordable = [
                count
                for count in range(num_prompt, most[0] + 1)
                if cost(count, num_token) < round(limit, 9)
            ]
            largest = affordable[-1]
        if is_served(ClusterDesign(*pair, largest, num_token)):
            row = ClusterDesign(*pair, largest, num_token)
            best = row._replace(num_prompt=_fewest_prompts(row, num_prompt, is_served))
        num_token += 1
    return best


def _fewest_prompts(
    design: ClusterDesign, least: int, is_served: Callable[[ClusterDesign], bool]
) -> int:
    """Return the fewest prefill machines, `least` or more, of a cluster that serves with all."""

    def is_too_few(count: int, *_: int) -> bool:
        return not is_served(design._replace(num_prompt=count))

    return bisect_last(is_too_few, least - 1, design.num_prompt) + 1


def choose_cheapest(border: Sequence[ClusterDesign], objective: str) -> ClusterDesign:
    """Return the cluster with the lowest cost, power or number of machines.

    Among equals the fewest prefill machines win.

    Args:
        border: Clusters to choose from.
        objective: Quantity to minimize: a name of BUDGETS.
    """
    unit = BUDGETS[objective]
    return min(border, key=lambda design: (round(unit(design), 9), design.num_prompt))
