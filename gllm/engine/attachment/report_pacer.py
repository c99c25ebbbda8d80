"""Times at which an engine reports changed loads to its routers."""

LOAD_REPORT_SECONDS = 0.1
"""Least time between two reports because of changed loads, and most time from a change to its
report. With it a router's view of a decode engine is not older than 300 ms on networks whose
latency is below 200 ms. Source: TetriInfer's cluster monitor collects loads every 100 ms."""


class ReportPacer:
    """Decides when a change is reported: at once, or when the latest report is old enough."""

    def __init__(self, interval_seconds: float = LOAD_REPORT_SECONDS) -> None:
        self._interval = interval_seconds
        self._reported_at: float | None = None
        self._is_scheduled = False

    def on_change(self, now: float) -> float | None:
        """Return the seconds until the report of a change; None if one is scheduled already."""
        if self._is_scheduled:
            return None
        self._is_scheduled = True
        if self._reported_at is None:
            return 0.0
        return max(0.0, self._reported_at + self._interval - now)

    def on_reported(self, now: float) -> None:
        """Note a report, scheduled or not."""
        self._is_scheduled = False
        self._reported_at = now
