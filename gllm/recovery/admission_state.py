"""Admission of requests by an engine or a router, from facts that change independently."""

from typing import NamedTuple


class AdmissionState(NamedTuple):
    """Phase of an engine's or router's life, and what operators have requested meanwhile."""

    phase: str
    """loading, ready, recovering or dead."""
    is_sleeping: bool = False
    """True after /sleep and before /wake_up, also while the engine recovers."""
    is_draining: bool = False
    """True once the end was requested and running requests finish."""
    is_recovery_overdue: bool = False
    """True if the running recovery has taken so long that requests no longer wait for it."""

    @property
    def name(self) -> str:
        """State in one word: loading, ready, recovering, sleeping, draining or dead."""
        if self.phase in ("loading", "dead"):
            return self.phase
        if self.is_draining:
            return "draining"
        if self.phase == "ready" and self.is_sleeping:
            return "sleeping"
        return self.phase

    @property
    def reason_to_refuse(self) -> str:
        """Reason for which new requests are refused: the name of a state.

        Empty if requests run, or wait for the end of a recovery.
        """
        if self.name in ("loading", "dead", "draining"):
            return self.name
        if self.is_sleeping:
            return "sleeping"
        is_parking = self.phase == "ready" or not self.is_recovery_overdue
        return "" if is_parking else self.phase
