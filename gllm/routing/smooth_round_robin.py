"""Turns in proportion to weights, spread evenly.

Source: smooth weighted round-robin of nginx (src/http/ngx_http_upstream_round_robin.c).
"""

from collections.abc import Mapping


class SmoothRoundRobin:
    """Weighted round-robin whose turns are spread evenly (a, b, a instead of a, a, b)."""

    def __init__(self) -> None:
        self._credits: dict[str, float] = {}

    def choose(self, weights: Mapping[str, float]) -> str | None:
        """Return the next name; each name is returned in proportion to its weight.

        Args:
            weights: Names and their weights, above 0; names may come and go. None without names.
        """
        if not weights:
            return None
        credits = {name: self._credits.get(name, 0.0) + weight for name, weight in weights.items()}
        # In the order of names, whatever the order of the weights.
        chosen = max(sorted(credits), key=credits.__getitem__)
        credits[chosen] -= sum(weights.values())
        self._credits = credits
        return chosen
