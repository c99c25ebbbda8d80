"""Budget of retries: a limit in proportion to the requests, so that retries cannot add up to load.

Source: RetryBudget of Twitter's Finagle.
"""

RETRIES_PER_SECOND = 1.0
"""Retries that are permitted without any requests."""
MAX_RETRIES = 100.0
"""Retries that may be saved up."""


class RetryBudget:
    """Token bucket of retries.

    Args:
        ratio: retries per request.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._num_retries = MAX_RETRIES * min(1.0, ratio)
        self._updated_at = 0.0

    def on_request(self, now: float) -> None:
        """Add the share of a new request."""
        self._refill(now)
        self._num_retries = min(MAX_RETRIES, self._num_retries + self._ratio)

    def may_retry(self, now: float) -> bool:
        """Use up one retry; return False if none is left."""
        self._refill(now)
        if self._num_retries < 1:
            return False
        self._num_retries -= 1
        return True

    def _refill(self, now: float) -> None:
        seconds, self._updated_at = max(0.0, now - self._updated_at), now
        self._num_retries = min(MAX_RETRIES, self._num_retries + RETRIES_PER_SECOND * seconds)
