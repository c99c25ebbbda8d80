"""Search for a smallest cluster that serves a throughput, for evaluations that take long."""

from collections.abc import Callable

from gllm.sim.hardware.machines import ClusterDesign, MachineType


def find_smallest(
    pair: tuple[MachineType, MachineType],
    serves: Callable[[ClusterDesign], bool],
    least: tuple[int, int],
    limit: tuple[int, int],
) -> tuple[ClusterDesign, int]:
    """Return a cluster that serves a throughput and lacks no machine for it, by few evaluations.

    First the fewest token machines beside the most prompt machines are bisected, then the fewest
    prompt machines beside these: `find_smallest_clusters` walks along all other clusters of the
    border, too.

    Args:
        pair: Prompt and token machine.
        serves: Returns True if a cluster serves the throughput.
        least: Numbers of prompt and token machines below which no cluster serves it.
        limit: Largest numbers of prompt and token machines.

    Returns:
        The cluster and the number of evaluations.

    Raises:
        ValueError: The largest cluster does not serve the throughput.
    """
    known: dict[tuple[int, int], bool] = {}

    def is_enough(num_prompt: int, num_token: int) -> bool:
        key = num_prompt, num_token
        if key not in known:
            known[key] = serves(ClusterDesign(*pair, *key))
        return known[key]

    if not is_enough(*limit):
        raise ValueError(
            f"{limit[0]} prompt and {limit[1]} token machines do not serve the throughput: raise "
            "the limit"
        )
    num_token = _bisect(lambda count: is_enough(limit[0], count), least[1], limit[1])
    num_prompt = _bisect(lambda count: is_enough(count, num_token), least[0], limit[0])
    return ClusterDesign(*pair, num_prompt, num_token), len(known)


def _bisect(is_enough: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least number of low..high that is enough; `high` is."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return high
