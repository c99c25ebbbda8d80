"""A router's knowledge of one engine: its reports, and the requests sent since the last one."""

from typing import NamedTuple

from gllm.messages.fleet import AnnounceEngine, EngineReport
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.options.slo import Slo
from gllm.routing.ongoing import OngoingRequests
from gllm.routing.state import EngineSnapshot
from gllm.scheduler.config import LOCAL_PRESETS
from gllm.scheduler.output_lengths import UNKNOWN_LENGTH, LengthEstimate

SETTLE_SECONDS = 0.05
"""Age from which a request is in the statistics that arrive: the time of both ways and of the
engine's next report on a network between two machines."""


class SentRequests:
    """Requests that an engine's latest statistics do not include yet, to be added to its load."""

    def __init__(self) -> None:
        self.requests: dict[int, tuple[float, int]] = {}
        """Time of sending and uncached prompt tokens by wire id, in order of sending."""
        self.num_sent_tokens = 0
        """Their uncached prompt tokens."""

    def on_sent(self, wire_id: int, num_tokens: int, now: float) -> None:
        """Add a request with its uncached prompt tokens."""
        self.on_output(wire_id)
        self.requests[wire_id] = now, num_tokens
        self.num_sent_tokens += num_tokens

    def on_output(self, wire_id: int) -> None:
        """Remove a request that has output or has ended; unknown ids are ignored."""
        if request := self.requests.pop(wire_id, None):
            self.num_sent_tokens -= request[1]

    def on_stats(self, now: float) -> None:
        """Remove the requests that statistics arriving now include."""
        for wire_id, (sent_at, _) in list(self.requests.items()):
            if now - sent_at < SETTLE_SECONDS:
                return
            self.on_output(wire_id)


class NextRequest(NamedTuple):
    """Load of the request for which an engine was chosen last; the next one that is sent to it."""

    num_tokens: int = 0
    """Uncached prompt tokens."""
    length_estimate: LengthEstimate = UNKNOWN_LENGTH
    """Predicted output length on this engine."""
    slo: Slo | None = None
    """Its limits of latency; None for none."""


class EngineRecord:
    """State and load of one attached engine, from its reports and the requests sent since.

    Reads no clock: time is an argument.
    """

    def __init__(
        self,
        announce: AnnounceEngine,
        report: EngineReport,
        now: float,
        tracks_ongoing: bool = False,
    ) -> None:
        """Create the state of an engine that has attached.

        Args:
            announce: first message of the engine, with its limits.
            report: its first report, with state and statistics.
            now: time in seconds.
            tracks_ongoing: follow the progress of each request of this router.
        """
        self.announce = announce
        self.report = report
        self.attached_at = now
        self.is_drain_requested = False
        """True from a drain by this router until the engine reports that it drains."""
        self._is_hold_requested = False
        """True after an operator's drain at this router, until the engine is ready again."""
        self.not_ready_since: float | None = None
        """Time since which the engine reports another state than ready."""
        self._next = NextRequest()
        self.name = announce.name
        self.stats = report.stats
        """Latest counters of the scheduler."""
        self._sent = SentRequests()
        self._ongoing = OngoingRequests() if tracks_ongoing else None
        self._snapshot: EngineSnapshot | None = None
        """None if it is not current."""
        self.on_report(report, now)

    @property
    def accepts_requests(self) -> bool:
        """True if the engine accepts new requests: it is ready and does not drain."""
        return self.report.state == "ready" and not self.is_drain_requested

    @property
    def is_held(self) -> bool:
        """True if an operator has drained the engine, so that autoscaling leaves it."""
        return self.report.is_held or self._is_hold_requested

    def request_drain(self, is_on: bool, is_held: bool) -> None:
        """Record a command to drain, or to accept requests again.

        Args:
            is_on: True to drain.
            is_held: True for an operator's command.
        """
        self.is_drain_requested = is_on
        self._is_hold_requested = is_on and is_held

    @property
    def state(self) -> str:
        """State that the engine reports; `draining` from the operator's command on."""
        return "draining" if self.is_drain_requested else self.report.state

    def on_report(self, report: EngineReport, now: float) -> None:
        """Store the state and statistics of a report."""
        self.report = report
        if report.state == "draining":
            self.is_drain_requested = False
        if report.state == "ready":
            self.not_ready_since = None
            if not self.is_drain_requested:
                self._is_hold_requested = False
        elif self.not_ready_since is None:
            self.not_ready_since = now
        self.stats = report.stats
        self._sent.on_stats(now)
        self._snapshot = None

    def on_outputs(self, message: EngineOutputs, now: float) -> None:
        """Store the statistics and the request progress of a step's output."""
        for first in message.outcome.first_tokens:
            self._sent.on_output(first.seq)
        for end in message.outcome.finished:
            self._sent.on_output(end.seq)
        if self._ongoing is not None:
            self._ongoing.on_tokens(message.outcome.seqs, now)
            self._ongoing.on_ended(end.seq for end in message.outcome.finished)
        self.stats = message.stats
        self._sent.on_stats(now)
        self._snapshot = None

    def on_chosen(self, request: NextRequest) -> None:
        """Note the request for which the engine is chosen, before it is sent."""
        self._next = request

    def on_submitted(self, message: SubmitRequest, now: float) -> None:
        """Add a request that is sent to the engine to its load."""
        # Of what is fetched from another engine only the last token is computed.
        num_tokens = self._next.num_tokens if message.kv_source is None else 1
        self._sent.on_sent(message.seq, num_tokens, now)
        if self._ongoing is not None:
            resumed = message.outputs or [[]] * message.n
            for index, output in enumerate(resumed):
                num_tokens = len(message.prompt) + len(output)
                wire_id, estimate = message.seq + index, self._next.length_estimate
                self._ongoing.on_sent(wire_id, num_tokens, estimate, self._next.slo)
        self._snapshot = None

    def on_aborted(self, message: AbortSequences) -> None:
        """Remove aborted sequences from the unfinished requests of the engine."""
        if self._ongoing is not None:
            self._ongoing.on_ended(message.seqs)

    def snapshot(self, weight: float = 1.0, now: float | None = None) -> EngineSnapshot:
        """Return the engine's state and load as input of a routing policy.

        Args:
            weight: share of its normal load that the engine should get.
            now: time in seconds; None for a snapshot without the requests of this router.
        """
        if self._snapshot is None or self._snapshot.weight != weight:
            announce = self.announce
            self._snapshot = EngineSnapshot(
                name=announce.name,
                role=announce.role,
                state=self.state,
                stats=self.stats,
                coefficients=self.report.coefficients,
                num_blocks=announce.num_blocks,
                block_size=announce.block_size,
                num_stages=announce.num_stages,
                num_sent=len(self._sent.requests),
                num_sent_tokens=self._sent.num_sent_tokens,
                weight=weight,
                max_num_seqs=announce.max_num_seqs,
                max_num_batched_tokens=announce.max_num_batched_tokens,
            )
        if self._ongoing is not None and now is not None:
            return self._snapshot._replace(ongoing=self._ongoing.list(), time=now)
        return self._snapshot


def unfit_reason(announce: AnnounceEngine, model: str, model_hash: str, max_model_len: int) -> str:
    """Return why an engine cannot serve this router's requests; empty if it can.

    Args:
        announce: first message of the engine: its model, limits and version.
        model: model of the router, for the text.
        model_hash: digest of the router's model.
        max_model_len: most tokens of prompt and output of the router's requests.
    """
    if announce.model_hash != model_hash:
        return (
            f"it serves {announce.model}, whose files differ from those of the router's model "
            f"{model}"
        )
    if announce.max_model_len < max_model_len:
        return (
            f"its maximum length is {announce.max_model_len} tokens, that of the router is "
            f"{max_model_len}: start the router with --max-model-len"
        )
    return ""


def preset_warning(announce: AnnounceEngine, preset: str | None) -> str:
    """Return a warning if an engine's scheduling policy does not fit the router's preset.

    Args:
        announce: first message of the engine, with its policy.
        preset: disaggregated system that the router reproduces; None for none.

    Returns:
        The text; empty if the policy fits.
    """
    if preset is None or announce.policy in ("", LOCAL_PRESETS[preset].policy):
        return ""
    return (
        f"engine {announce.name} has policy {announce.policy}, but the router has --preset "
        f"{preset}: start the engine with --preset {preset}"
    )
