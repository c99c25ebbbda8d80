"""Output of a request on its way from a step's output to the reader."""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from gllm.messages.requests import EngineOutputs, ErrorKind
from gllm.messages.sampling import SampleDetails, TokenLogprobs
from gllm.runtime.head.journal import JournalEntry
from gllm.scheduler.plan import FinishedSequence, FirstToken


class TokenDelta(msgspec.Struct, gc=False):
    """New tokens, log-probabilities and end of one choice, since its reader last read them."""

    tokens: list[int]
    """Token ids."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probability of each token, if requested."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities of the prompt from its second token on, if requested; in the first
    delta."""
    embedding: bytes = b""
    """Embedding of the prompt as little-endian float32, if requested."""
    first: FirstToken | None = None
    """Cached tokens and queueing time of the choice; set in its first delta."""
    end: FinishedSequence | None = None
    """Finish reason and error; set in the last delta of the choice. Its `seq` has no meaning for
    the reader."""
    error_kind: ErrorKind = ""
    """Kind of the error that `end` has."""


def _no_listener() -> None:
    """Do nothing: deltas are kept until they are read."""


class RequestStream:
    """Unread output of one request, by choice; a reader polls it or is called on new output."""

    __slots__ = (
        "_pending",
        "alive",
        "deltas",
        "entry",
        "listener",
        "num_resumptions",
        "request_id",
        "submitted_to",
    )

    def __init__(
        self, entry: JournalEntry, request_id: str, pending: "list[RequestStream]"
    ) -> None:
        """Create the stream.

        Args:
            entry: journal entry of the request.
            request_id: id of the request, not unique.
            pending: streams whose listeners have to be notified; this stream adds itself when it
                gets its first delta.
        """
        self.entry = entry
        self.alive = entry.alive
        """Choices that have not ended, in the journal."""
        self.request_id = request_id
        self.num_resumptions = 0
        """Number of recoveries after which the request was submitted again."""
        self.listener: Callable[[], None] = _no_listener
        """Called after a step that added output to the empty stream."""
        self._pending = pending
        self.submitted_to: dict[int, SubmittedChoice] = {}
        """Running choices by wire id of the scheduler that has the request, or had it last."""
        self.deltas: dict[int, TokenDelta] = {}
        """Output that was not read, by choice."""

    def delta(self, choice: int) -> TokenDelta:
        """Return the delta to which new output of a choice is added."""
        return self.deltas.get(choice) or self.start_delta(choice, [])

    def start_delta(self, choice: int, tokens: list[int]) -> TokenDelta:
        """Create the delta of a choice that has no unread output."""
        if not self.deltas:
            self._pending.append(self)
        delta = self.deltas[choice] = TokenDelta(tokens)
        return delta

    def pop_deltas(self) -> dict[int, TokenDelta]:
        """Return the output since the last call, by choice."""
        deltas, self.deltas = self.deltas, {}
        return deltas

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Replace the listener.

        It is called after a step that added output to an empty stream, and at once if the stream
        has output. It must not raise.
        """
        self.listener = listener
        if self.deltas:
            listener()

    def remove_listener(self) -> None:
        """Keep deltas until they are read."""
        self.listener = _no_listener

    async def wait(self) -> None:
        """Wait until the stream has output; for one task, instead of a listener."""
        has_output = asyncio.Event()
        self.set_listener(has_output.set)
        try:
            await has_output.wait()
        finally:
            self.remove_listener()


class SubmittedChoice(NamedTuple):
    """Target of a sequence's output: its request's stream, its choice, and its token list."""

    stream: RequestStream
    choice: int
    """Index of the choice."""
    append: Callable[[int], None]
    """Adds a token to the list of the choice's delivered tokens."""


def deliver_outputs(
    message: EngineOutputs, choices: Mapping[int, SubmittedChoice]
) -> list[SubmittedChoice]:
    """Add the tokens of a step to the streams of their requests and to the delivered tokens.

    Args:
        message: output of a step, by sequence id.
        choices: running choices by sequence id. Output of other ids is dropped: their choices have
            ended, or belong to an earlier scheduler.

    Returns:
        The choices that have ended.
    """
    outcome = message.outcome
    if message.details:
        _deliver_details(message.details, choices)
    for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True):
        target = choices.get(seq)
        if target is not None:
            stream, choice, append = target
            append(token)
            # A fast reader has a new delta for each token.
            delta = stream.deltas.get(choice)
            if delta is None:
                stream.start_delta(choice, [token])
            else:
                delta.tokens.append(token)
    for first in outcome.first_tokens:
        if target := choices.get(first.seq):
            entry = target.stream.entry
            if target.choice not in entry.started:
                entry.started.add(target.choice)
                if entry.num_cached_tokens is not None:
                    first = first._replace(num_cached_tokens=entry.num_cached_tokens)
                target.stream.delta(target.choice).first = first
    ended = []
    kinds = dict(message.error_kinds)
    for end in outcome.finished:
        if target := choices.get(end.seq):
            delta = target.stream.delta(target.choice)
            delta.end, delta.error_kind = end, kinds.get(end.seq, "")
            ended.append(target)
    return ended


def _deliver_details(details: list[SampleDetails], choices: Mapping[int, SubmittedChoice]) -> None:
    """Add values that come with a token; those of the prompt are delivered once."""
    for row in details:
        target = choices.get(row.seq)
        if target is None:
            continue
        entry, delta = target.stream.entry, target.stream.delta(target.choice)
        if row.prompt_logprobs and not entry.prompt_logprobs_sent:
            entry.prompt_logprobs_sent = True
            delta.prompt_logprobs = row.prompt_logprobs
        if row.embedding and not entry.embedding_sent:
            entry.embedding_sent = True
            delta.embedding = row.embedding
        if row.sampled is not None:
            if delta.logprobs is None:
                delta.logprobs = []
            delta.logprobs.append(row.sampled)
