"""State machine of one request that one engine prefills and another one decodes.

Source: Zhong et al., "DistServe" (OSDI 2024), section 4.3: token 1 and the KV cache are made by the
prefill instance, and the decode instance pulls the KV cache. docs/disaggregation.md has the table
of states and failures. Pure: time is an argument, and methods return the actions to take, in order.

Almost every failure is an ordinary prefill: the request goes on with the tokens that its reader
has, at any engine. Only if the decode engine is lost before its first token, the blocks are still
held, and another engine fetches them. The machine never keeps a request; it says when to submit it,
and it releases the blocks that the prefill engine holds on every path.
"""

import math
from enum import Enum
from typing import NamedTuple

from gllm.routing.disaggregation.policy import EnginePair


class HandoffState(Enum):
    """Progress of a disaggregated request from its prefill engine to its decode engine."""

    PREFILL = "prefill"
    """The prefill engine has the request, for one token."""
    READY = "ready"
    """Token 1 has arrived; its text may still end the request."""
    TRANSFER = "transfer"
    """Token 1 does not end the request. The decode engine has the request and has returned no
    token, or one has to be found."""
    DECODE = "decode"
    """The decode engine has returned a token; the prefill engine holds nothing."""
    DONE = "done"
    """The request has ended, or is an ordinary one from now on."""


class HandoffLimits(NamedTuple):
    """Time limits in seconds for KV blocks that wait at the prefill engine for their transfer."""

    renew_seconds: float = 5.0
    """Time between two renewals of the lease on the KV blocks: less than half of the lease."""
    read_seconds: float = 1.0
    """Longest wait for the first token to be turned into text, which may end the request."""
    hold_seconds: float = 60.0
    """Age at which the KV blocks are freed although their transfer has not ended."""


class ReleaseHold(NamedTuple):
    """Action: tell an engine to free the KV blocks that it keeps or prefetches for a request."""

    engine: str
    ticket: int
    """Key of the KV blocks."""


class RenewHold(NamedTuple):
    """Action: tell an engine to keep the KV blocks of a request for longer."""

    engine: str
    ticket: int
    """Key of the KV blocks."""


HandoffAction = ReleaseHold | RenewHold
"""Commands about blocks; the caller submits the request by the state."""


class Handoff:
    """State machine of a request that is prefilled on one engine and decoded on another.

    Its methods handle events and return commands about KV blocks. Does no I/O; time is an argument.
    """

    def __init__(
        self, pair: EnginePair, ticket: int, limits: HandoffLimits, move_cause: str = ""
    ) -> None:
        """Create the state of a request that was sent to its prefill engine (PREFILL).

        Args:
            pair: engines that were chosen, different ones; without a decode engine any will do.
            ticket: key of the KV blocks at the prefill engine.
            limits: time limits.
            move_cause: reason of a move, if the first engine decodes the request already, until
                its next token; empty if it computes the prompt.
        """
        self.move_cause = move_cause
        """Reason of the move of a request that had tokens when the hand-off began, otherwise
        empty."""
        self.prefilled_at = 0.0
        """Time of the first engine's last token in seconds; 0 before it."""
        self.state = HandoffState.PREFILL
        self.outcome = ""
        """Result once it is clear: `transferred` (the decode engine went on; it may have computed
        the blocks itself), `ended` (before that), `prefill_failed` or `decode_failed`."""
        self.pair = pair
        self.ticket = ticket
        self._limits = limits
        self.decode = pair.decode or ""
        """Engine that is to decode; empty for any."""
        self._asked = ""
        """Engine that has the request in TRANSFER and DECODE; empty while it is parked."""
        self.is_held = True
        """True until the prefill engine is lost, lacks the blocks or is asked to free them."""
        self._is_readable = False
        """True if the blocks can be fetched while the prompt is computed."""
        self._prefetching = ""
        """Engine that may have blocks for the request, which it has not got; empty for none."""
        self._read_deadline = self._hold_deadline = self._renew_at = 0.0

    @property
    def waits_for(self) -> str:
        """Engine that computes the request now; empty in the other states."""
        match self.state:
            case HandoffState.PREFILL:
                return self.pair.prefill
            case HandoffState.TRANSFER | HandoffState.DECODE:
                return self._asked
        return ""

    @property
    def next_tick(self) -> float:
        """Time of the next deadline that `on_tick` handles; infinity if there is none.

        Only `start_prefetch` and `on_prefilled` make it earlier.
        """
        times = [math.inf]
        if self.state is HandoffState.READY:
            times.append(self._read_deadline)
        if self._is_hold_leased:
            times.append(self._hold_deadline)
        if self._is_hold_leased or self._is_prefetch_leased:
            times.append(self._renew_at)
        return min(times)

    @property
    def _is_hold_leased(self) -> bool:
        return self.is_held and self.state in (HandoffState.READY, HandoffState.TRANSFER)

    @property
    def _is_prefetch_leased(self) -> bool:
        phases = (HandoffState.PREFILL, HandoffState.READY)
        return bool(self._prefetching) and self.state in phases

    def on_readable(self) -> None:
        """Record that the blocks can be fetched while the prompt is computed."""
        self._is_readable = True

    def on_decode_chosen(self, engine: str) -> None:
        """Set the decode engine during PREFILL, unless there is one."""
        if self.state is HandoffState.PREFILL:
            self.decode = self.decode or engine

    def start_prefetch(self, now: float) -> bool:
        """Start to fetch the blocks while the prompt is computed, in PREFILL.

        Returns:
            True if `decode` is to fetch them; False without a decode engine, before
            `on_readable`, and if an engine fetches them already.
        """
        if self.state is not HandoffState.PREFILL or not (self._is_readable and self.decode):
            return False
        if self._prefetching or self.decode == self.pair.prefill:
            return False
        self._prefetching = self.decode
        self._renew_at = now + self._limits.renew_seconds
        return True

    def on_prefilled(self, now: float, is_held: bool = True) -> None:
        """Handle token 1 of a request that continues: PREFILL -> READY.

        Args:
            now: time in seconds.
            is_held: True if the prefill engine has kept the blocks.
        """
        assert self.state is HandoffState.PREFILL
        self.state, self.is_held = HandoffState.READY, self.is_held and is_held
        self.prefilled_at = now
        self._read_deadline = now + self._limits.read_seconds
        self._hold_deadline = now + self._limits.hold_seconds
        self._renew_at = now + self._limits.renew_seconds

    def on_read(self) -> bool:
        """Handle that the text of token 1 does not end the request: READY -> TRANSFER.

        Returns:
            True if the request is to be submitted to `decode`, with the blocks if `is_held`; False
            in other states.
        """
        if self.state is not HandoffState.READY:
            return False
        self.state = HandoffState.TRANSFER
        return True

    def on_submitted(self, engine: str) -> list[HandoffAction]:
        """Handle the submission of the request to an engine, in TRANSFER.

        The prefill engine itself, which its policy may have chosen, has the blocks anyway.
        """
        if self.state is not HandoffState.TRANSFER:
            return []
        self._asked = engine
        if engine == self.pair.prefill:
            return self._release()
        return self._release_prefetch() if engine != self._prefetching else []

    def on_decoded(self) -> list[HandoffAction]:
        """Handle the first token of the decode engine: TRANSFER -> DECODE."""
        if self.state is not HandoffState.TRANSFER:
            return []
        self.state, self.outcome = HandoffState.DECODE, "transferred"
        self._prefetching = ""
        return self._release()

    def on_given_back(self, engine: str) -> list[HandoffAction]:
        """Handle that the engine which computed the request no longer does; ignores other engines.

        The caller parks the request, and submits it as any other one: with the blocks as before if
        they are held and their receiver has returned no token, otherwise to be computed.
        """
        if not engine or engine != self.waits_for:
            return []
        if self.state is HandoffState.TRANSFER and self.is_held:
            self._asked = self.decode = ""
            return self._release_prefetch()
        failed = "prefill_failed" if self.state is HandoffState.PREFILL else "decode_failed"
        self.outcome = self.outcome or failed
        self.state = HandoffState.DONE
        return self._release()

    def on_lost(self, engine: str) -> None:
        """Handle the loss of an engine and its blocks; `on_given_back` may follow."""
        if engine == self.pair.prefill:
            self.is_held = False
        if engine == self.decode:
            self.decode = ""
        if engine == self._prefetching:
            self._prefetching = ""

    def on_end(self) -> list[HandoffAction]:
        """Handle the end of the request, in any state."""
        self.outcome = self.outcome or "ended"
        self.state = HandoffState.DONE
        return self._release()

    def on_tick(self, now: float) -> list[HandoffAction]:
        """Handle deadlines that have passed: of token 1, of the leases, and of the KV blocks."""
        if self.state is HandoffState.READY and now >= self._read_deadline:
            self.on_read()
            return []
        engines = []
        if self._is_hold_leased:
            if now >= self._hold_deadline:
                return self._release()
            engines.append(self.pair.prefill)
        if self._is_prefetch_leased:
            engines.append(self._prefetching)
        if not engines or now < self._renew_at:
            return []
        self._renew_at = now + self._limits.renew_seconds
        return [RenewHold(engine, self.ticket) for engine in engines]

    def _release(self) -> list[HandoffAction]:
        actions = self._release_prefetch()
        if self.is_held:
            self.is_held = False
            actions.append(ReleaseHold(self.pair.prefill, self.ticket))
        return actions

    def _release_prefetch(self) -> list[HandoffAction]:
        engine, self._prefetching = self._prefetching, ""
        return [ReleaseHold(engine, self.ticket)] if engine else []
