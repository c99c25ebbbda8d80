"""Progress of loading the weights over all stages."""

from collections.abc import Callable

from gllm.messages.lifecycle import LoadProgress


class TotalLoadProgress:
    """Sum of the progress of the workers that load."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        """Create a sum of nothing.

        on_progress: called after each report with the bytes loaded and in total.
        """
        self._on_progress = on_progress
        self._parts: dict[int, LoadProgress] = {}
        """Latest report of each worker."""

    def clear(self) -> None:
        """Forget the reports, because other workers load."""
        self._parts.clear()

    def on_report(self, sender: int, report: LoadProgress) -> None:
        """Replace the report of a worker."""
        self._parts[sender] = report
        parts = self._parts.values()
        self._on_progress(
            sum(part.done_bytes for part in parts), sum(part.total_bytes for part in parts)
        )
