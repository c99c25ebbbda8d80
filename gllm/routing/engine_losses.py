"""Find the request that kills engines, among losses that are mostly no deaths.

A router sees that a session has ended, and seldom why. Silence is no death: the host may be paused
or the network interrupted. A closed connection is a presumed death, until the same start of the
engine announces itself again. A death is proven by another start of the engine, by an address that
refuses connections where it accepted them before, or by an engine with a closed connection that
stays away while the router reaches other engines. Pure: time is an argument.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

RETURN_SECONDS = 15.0
"""Time in which an engine that lives has dialled the router again after its connection was closed:
more than the longest delay between two attempts and the time limit of one."""
TOGETHER_SECONDS = 2.0
"""Time within which all engines are lost that die of one cause, such as the end of their machine.
Until then a suspect has no engine for itself: it would seem to kill one that is already dead."""
PROOF_SECONDS = 600.0
"""Time after a loss in which its death may still be proven."""

Request = TypeVar("Request")


class LossKind(Enum):
    """Kinds of the end of a session with an engine."""

    PLANNED = "planned"
    """The engine has drained or finished."""
    SILENT = "silent"
    """No message arrived in time, or the session ended by an error of the connection."""
    CLOSED = "closed"
    """The engine's end of the connection was closed without a notice."""
    DIED = "died"
    """The death is proven."""


@dataclass(eq=False)
class _Loss(Generic[Request]):
    """An engine that was lost, and the requests that it had."""

    engine: str
    run: int
    kind: LossKind
    cause: str
    requests: set[Request]
    """Requests without a token or an end since."""
    lone: Request | None
    """Suspect that had the engine for itself."""
    has_control: bool
    """True if another engine lived on through the time in which the suspect ran alone."""
    at: float
    """Time of the loss, or of the first contact with an engine after it."""
    first_at: float
    """Time of the loss."""
    can_return: bool
    """False if its workers have died, so that a return of the engine's process says nothing."""

    @property
    def counts(self) -> bool:
        """True if its requests are taken for possible causes."""
        return self.kind in (LossKind.CLOSED, LossKind.DIED)


class PoisonRequest(NamedTuple, Generic[Request]):
    """Request that is found to kill engines, and the cause of the end of its last engine."""

    request: Request
    cause: str


class EngineLosses(Generic[Request]):
    """Counts the deaths of engines per request, to find a request that kills engines.

    A death counts for each request that the engine had and that has got no token since. From some
    number of presumed or proven deaths on a request is a suspect and runs alone, but not before the
    other engines are known that have died with its last one. It is to blame if all these deaths are
    proven, and that of an engine which it had for itself while another engine lived on; without
    another engine, if two such engines died.
    """

    def __init__(self, suspect_deaths: int) -> None:
        """Create the record of a router without losses.

        Args:
            suspect_deaths: deaths after which a request runs alone.
        """
        self.isolated: Request | None = None
        """Suspect that runs alone and has got no token since; None ends that."""
        self._isolated_at = 0.0
        self._suspect_deaths = suspect_deaths
        self._losses: list[_Loss[Request]] = []
        self._contact_since: float | None = None
        """Time since which the router has reached an engine; None while it reaches none."""

    @property
    def has_losses(self) -> bool:
        """True if a loss counts or may count for some request."""
        return bool(self._losses)

    def num_deaths(self, request: Request) -> int:
        """Return the number of presumed and proven deaths that count for a request."""
        return sum(loss.counts and request in loss.requests for loss in self._losses)

    def on_lost(
        self,
        engine: str,
        run: int,
        kind: LossKind,
        cause: str,
        requests: Iterable[Request],
        oldest_other: float | None,
        now: float,
    ) -> list[PoisonRequest[Request]]:
        """Record the end of a session with an engine.

        Args:
            engine: name.
            run: number of the start of its process.
            kind: kind of the end.
            cause: description of the end.
            requests: requests that it had.
            oldest_other: time since which another engine has been attached; None for no other.
            now: time in seconds.

        Returns:
            The requests that are found to kill engines.
        """
        affected = set(requests)
        lone = None
        if self.isolated in affected:
            isolated, self.isolated = self.isolated, None
            if len(affected) == 1:
                lone = isolated
        if not affected or kind is LossKind.PLANNED:
            return []
        has_control = oldest_other is not None and oldest_other <= self._isolated_at
        can_return = kind is not LossKind.DIED
        self._losses.append(
            _Loss(engine, run, kind, cause, affected, lone, has_control, now, now, can_return)
        )
        return self._poisons() if kind is LossKind.DIED else []

    def on_attached(self, engine: str, run: int) -> list[PoisonRequest[Request]]:
        """Record the beginning of a session; return the requests that are found to kill engines.

        The same start of a lost engine has not died; another start proves the death of the former.
        """
        self._losses = [
            loss
            for loss in self._losses
            if not loss.can_return or (loss.engine, loss.run) != (engine, run)
        ]
        return self._prove(lambda loss: loss.engine == engine)

    def on_refused(self, run: int) -> list[PoisonRequest[Request]]:
        """Record that a lost engine's address refuses connections, which it accepted before.

        Returns:
            The requests that are found to kill engines.
        """
        return self._prove(lambda loss: loss.run == run)

    def on_tick(self, is_in_contact: bool, now: float) -> list[PoisonRequest[Request]]:
        """Decide about losses by closed connections, and forget old losses.

        Args:
            is_in_contact: True if the router reaches an engine.
            now: time in seconds.

        Returns:
            The requests that are found to kill engines.
        """
        self._losses = [loss for loss in self._losses if now - loss.first_at < PROOF_SECONDS]
        if not is_in_contact:
            self._contact_since = None
            return []
        if self._contact_since is None:
            self._contact_since = now
        for loss in self._losses:
            loss.at = max(loss.at, self._contact_since)
        return self._prove(
            lambda loss: loss.kind is LossKind.CLOSED and now - loss.at >= RETURN_SECONDS
        )

    def clear(self, request: Request) -> None:
        """Forget the losses of a request because it has a new token or has ended."""
        for loss in self._losses:
            loss.requests.discard(request)
        self._losses = [loss for loss in self._losses if loss.requests]
        if self.isolated is request:
            self.isolated = None

    def suspects(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that have to run alone, because enough deaths count for them."""
        if not self._losses:
            return []
        return [request for request in requests if self.num_deaths(request) >= self._suspect_deaths]

    def awaits_proof(self, request: Request) -> bool:
        """Return True if a suspect has to wait until it is known if its last engine has died."""
        return any(
            loss.kind is LossKind.CLOSED and loss.lone is request and request in loss.requests
            for loss in self._losses
        )

    def may_isolate(self, request: Request, now: float) -> bool:
        """Return True if a suspect can have an engine for itself now."""
        deaths = [
            loss.first_at for loss in self._losses if loss.counts and request in loss.requests
        ]
        is_settled = now - max(deaths, default=-math.inf) >= TOGETHER_SECONDS
        return is_settled and not self.awaits_proof(request)

    def isolate(self, request: Request, now: float) -> None:
        """Record that a suspect has an engine for itself from now on."""
        self.isolated = request
        self._isolated_at = now

    def _prove(self, is_dead: Callable[[_Loss[Request]], bool]) -> list[PoisonRequest[Request]]:
        """Take losses for proven deaths; return the requests that are found to kill engines."""
        proven = [loss for loss in self._losses if loss.kind is not LossKind.DIED and is_dead(loss)]
        for loss in proven:
            loss.kind = LossKind.DIED
        return self._poisons() if proven else []

    def _poisons(self) -> list[PoisonRequest[Request]]:
        """Return the requests to blame; the deaths that they explain count no longer."""
        poisons = []
        causes = {loss.lone: loss.cause for loss in self._losses}
        for request, cause in causes.items():
            if request is not None and self._is_poison(request):
                poisons.append(PoisonRequest(request, cause))
                self._losses = [loss for loss in self._losses if request not in loss.requests]
        return poisons

    def _is_poison(self, request: Request) -> bool:
        deaths = [
            loss for loss in self._losses if loss.kind is LossKind.DIED and request in loss.requests
        ]
        lone = [loss for loss in deaths if loss.lone is request]
        has_proof = len(lone) > 1 or any(loss.has_control for loss in lone)
        return has_proof and len(deaths) > self._suspect_deaths
