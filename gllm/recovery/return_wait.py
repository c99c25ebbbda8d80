"""Wait for a lost node, before its stages get other nodes.

Nobody knows whether the node returns. A wait of the time that other stages would cost is at most
twice as long as the best decision in hindsight (Karlin, Manasse, Rudolph and Sleator, "Competitive
Snoopy Caching", Algorithmica 3, 1988).
"""

import math

MIN_RETURN_SECONDS = 10.0
"""Shortest wait: a manager starts a process again within this time, and a machine that returns in
time costs one pause instead of two."""


def choose_return_seconds(predicted_seconds: float, seconds_left: float) -> float:
    """Return the time for which the stages of a lost node wait for it.

    Args:
        predicted_seconds: time until the engine would serve without the node: its layers are
            loaded, and the running requests are computed again.
        seconds_left: time until the running requests are rejected; infinite if there is no limit.
    """
    wanted = max(predicted_seconds, MIN_RETURN_SECONDS)
    if predicted_seconds <= seconds_left < wanted + predicted_seconds:
        # The other nodes can still answer the requests.
        return seconds_left - predicted_seconds
    return wanted


def predict_reload_seconds(
    seconds_per_layer: float, num_lost_layers: int, num_stages_left: int
) -> float:
    """Return the time in which the other stages load the layers of lost ones, all at once."""
    return seconds_per_layer * math.ceil(num_lost_layers / num_stages_left)
