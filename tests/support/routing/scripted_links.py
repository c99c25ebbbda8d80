"""Engines of a fleet without processes and sockets: the test sends their messages."""

import time
from collections.abc import Callable
from typing import Any

from gllm.messages.base import WireMessage
from gllm.messages.fleet import AnnounceEngine, EngineReport, GreetEngine
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.runtime.messaging.fleet_links import EngineLink
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats, StepOutput

ANNOUNCE = AnnounceEngine(
    protocol=1,
    oldest_protocol=1,
    name="a",
    run=1,
    role="mixed",
    model="demo",
    model_hash="hash",
    numerics="same",
    version="1",
    max_model_len=64,
    vocab_size=100,
    block_size=4,
    num_blocks=32,
    num_stages=1,
)


class ScriptedLink:
    """One attached engine, played by the test."""

    def __init__(self, links: "ScriptedLinks", announce: AnnounceEngine) -> None:
        self.links = links
        self.announce = announce
        self.name = announce.name
        self.address = "127.0.0.1:1"
        self.report = EngineReport("ready", "", SchedulerStats())
        self.last_heard = time.monotonic()
        self.sent: list[WireMessage] = []
        self.refusal = ""
        self.is_leaving = False

    def send(self, message: WireMessage) -> None:
        self.sent.append(message)

    def refuse(self, cause: str) -> None:
        self.refusal = cause
        self.links.links.pop(self.name, None)

    @property
    def requests(self) -> list[SubmitRequest]:
        """Requests that were sent to it."""
        return [message for message in self.sent if isinstance(message, SubmitRequest)]

    @property
    def aborted(self) -> list[int]:
        """Wire ids that the engine has to abort."""
        aborts = [message for message in self.sent if isinstance(message, AbortSequences)]
        return [seq for abort in aborts for seq in abort.seqs]

    def change(self, state: str, cause: str = "") -> None:
        """Report another state."""
        self.report = EngineReport(state, cause, SchedulerStats())
        self.is_leaving = state == "draining"
        self.links.on_message(self, self.report)

    def answer(self, request: SubmitRequest, *tokens: int, reason: str | None = None) -> None:
        """Send tokens of a request of one choice, and its end for a reason."""
        for token in tokens:
            step = StepOutput([request.seq], [token], [FirstToken(request.seq, 0, 0.0)], [])
            self.links.on_message(self, EngineOutputs(step, SchedulerStats()))
        if reason is not None:
            step = StepOutput([], [], [], [FinishedSequence(request.seq, reason)])
            self.links.on_message(self, EngineOutputs(step, SchedulerStats()))

    def leave(self, cause: str = "killed") -> None:
        """End the session."""
        self.links.links.pop(self.name, None)
        self.links.on_lost(self, cause)


class ScriptedLinks:
    """Stands for FleetLinks."""

    hub_address = ""
    num_refused_peers = 0
    greeting = GreetEngine(1, 1, "router", 77)

    def __init__(
        self,
        config: Any,
        router: str,
        on_attached: Callable[[EngineLink], None],
        on_lost: Callable[[Any, str], None],
        on_message: Callable[[Any, Any], None],
    ) -> None:
        self.links: dict[str, Any] = {}
        self.on_attached: Callable[[Any], None] = on_attached
        self.on_lost = on_lost
        self.on_message = on_message

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        self.links.clear()

    def attach(self, announce: AnnounceEngine, state: str = "ready") -> ScriptedLink:
        """Attach an engine."""
        link = ScriptedLink(self, announce)
        link.report = EngineReport(state, "", SchedulerStats())
        self.links[link.name] = link
        self.on_attached(link)
        return link
