"""Find the request that kills workers.

A death is counted for each request with rows in a plan that had not committed, or whose grammar was
being compiled. From its second death on a request is a suspect and runs alone. If a worker dies
while only a suspect runs, that request is to blame: it ends, equal requests are refused for a
while, and the deaths in which it was computed no longer count for others. A new token clears a
request. Pure: time is an argument.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

import msgspec

from gllm.messages.requests import PoisonRequestError
from gllm.messages.sampling import SequenceSamplingParams

SUSPECT_DEATHS = 2
"""Deaths after which a request runs alone."""
REFUSAL_SECONDS = 600.0
"""Time for which requests equal to a poison request are refused."""
MAX_FINGERPRINTS = 1024
"""Most poison requests that are remembered; the oldest are forgotten first."""

Request = TypeVar("Request")


class SuspectTracker(Generic[Request]):
    """Counts worker crashes per request, to find a request that crashes workers (a suspect).

    A crash counts for each request that was being computed. After two, a request runs alone; a new
    token resets its count.
    """

    def __init__(self, suspect_deaths: int = SUSPECT_DEATHS) -> None:
        """Create a tracker.

        Args:
            suspect_deaths: deaths after which a request runs alone.
        """
        self.isolated: Request | None = None
        """Suspect that runs alone and has got no token since; None ends that."""
        self._suspect_deaths = suspect_deaths
        self._isolated_seqs: frozenset[int] = frozenset()
        self._deaths: list[set[Request]] = []
        """For each death, the requests that it still counts for."""

    @property
    def has_deaths(self) -> bool:
        """True if a crash counts for some request."""
        return bool(self._deaths)

    def num_deaths(self, request: Request) -> int:
        """Return the number of crashes that count for a request."""
        return sum(request in death for death in self._deaths)

    def on_death(self, seqs: Collection[int], owners: Mapping[int, Request]) -> Request | None:
        """Count a crash of a worker, or of an engine behind a router.

        Args:
            seqs: ids of the sequences with rows in uncommitted plans.
            owners: running request of each sequence id; rows of choices that have ended have none.

        Returns:
            The request that is found to cause the crashes; None if it is not known.
        """
        computed = {owners[seq] for seq in seqs if seq in owners}
        if self.isolated in computed:
            isolated, self.isolated = self.isolated, None
            if isolated is not None and self._isolated_seqs.issuperset(seqs):
                self._deaths = [death for death in self._deaths if isolated not in death]
                return isolated
        if computed:
            self._deaths.append(computed)
        return None

    def clear(self, request: Request) -> None:
        """Reset the crashes of a request because it has a new token or has ended."""
        for death in self._deaths:
            death.discard(request)
        self._deaths = [death for death in self._deaths if death]
        if self.isolated is request:
            self.isolated = None

    def suspects(self, requests: Iterable[Request]) -> list[Request]:
        """Return the requests that have to run alone, because two crashes count for them."""
        if not self._deaths:
            return []
        return [request for request in requests if self.num_deaths(request) >= self._suspect_deaths]

    def isolate(self, request: Request, seqs: Iterable[int]) -> None:
        """Record that only one suspect runs, so that it is the cause of the next crash.

        Args:
            request: a suspect.
            seqs: ids of its sequences.
        """
        self.isolated = request
        self._isolated_seqs = frozenset(seqs)


class PoisonList:
    """Recent requests that have crashed workers; equal requests are refused for a limited time.

    It stores hashes of prompt and sampling parameters.
    """

    def __init__(self) -> None:
        self._expiries: dict[bytes, float] = {}
        """Time until which a fingerprint is refused, oldest first."""

    def add(self, prompt: Sequence[int], sampling: SequenceSamplingParams, now: float) -> None:
        """Refuse equal requests from now on."""
        key = fingerprint(prompt, sampling)
        self._expiries.pop(key, None)
        self._expiries[key] = now + REFUSAL_SECONDS
        if len(self._expiries) > MAX_FINGERPRINTS:
            del self._expiries[next(iter(self._expiries))]

    def check(self, prompt: Sequence[int], sampling: SequenceSamplingParams, now: float) -> None:
        """Check that no equal request has killed workers recently.

        Raises:
            PoisonRequestError: one is.
        """
        while self._expiries and (first := next(iter(self._expiries.items())))[1] <= now:
            del self._expiries[first[0]]
        if not self._expiries:
            return
        expiry = self._expiries.get(fingerprint(prompt, sampling))
        if expiry is not None:
            raise PoisonRequestError(
                "an equal request has ended worker processes again and again; equal requests are "
                f"refused for another {expiry - now:.0f} seconds"
            )


def fingerprint(prompt: Sequence[int], sampling: SequenceSamplingParams) -> bytes:
    """Return a hash of a request's prompt and sampling parameters, without the seed.

    The seed is left out because a request without one gets a new seed each time.
    """
    biases = dict(sorted(sampling.logit_bias.items()))
    sampling = msgspec.structs.replace(sampling, seed=0, logit_bias=biases)
    return blake2b(msgspec.msgpack.encode((list(prompt), sampling)), digest_size=16).digest()
