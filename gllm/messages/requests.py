"""Messages between the frontend and the driver about requests."""

import math
from typing import Annotated, Literal

from msgspec import Meta

from gllm.messages.base import TokenId, WireMessage
from gllm.messages.handoff import KvSource
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.options.limits import MAX_SESSION_CHARACTERS
from gllm.scheduler.plan import SchedulerStats, StepOutput

ErrorKind = Literal["", "unavailable", "poison"]
"""Kind of a request's error: `unavailable` if the engine did not recover in time (the request may
be sent again later or to another engine), `poison` if workers died while they computed the request
(it must not be sent again), empty otherwise."""


class PoisonRequestError(Exception):
    """Error: equal requests have repeatedly killed the workers that computed them."""


class SubmitRequest(WireMessage, frozen=True):
    """Command to the scheduler: run a request, whose choices are the sequences seq .. seq + n - 1.

    A request that an earlier engine process did not finish is submitted again with the choices that
    still run and the tokens that each of them has reported; it continues after these tokens.
    """

    seq: int
    prompt: list[TokenId]
    sampling: SequenceSamplingParams
    max_tokens: int
    """Most tokens to generate for each choice, `outputs` included; prompt and output fit the
    context."""
    stop_ids: list[TokenId]
    """Token ids that end a sequence; includes those of EOS unless the request ignores EOS."""
    n: Annotated[int, Meta(ge=1)] = 1
    """Number of choices."""
    priority: int = 0
    """Requests with smaller values run earlier."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    choices: list[Annotated[int, Meta(ge=0, lt=2**31)]] = []
    """Index of each sequence among the choices of the request as it was first submitted; empty for
    0 .. n - 1."""
    outputs: list[list[TokenId]] = []
    """Tokens that each sequence reported earlier; empty if none did."""
    age_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Time since the request was first submitted; it determines the order of arrival."""
    request_id: str = ""
    """Id of the HTTP request, for logs; only from a router."""
    kv_ticket: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Key under which KV blocks of all computed tokens are kept at its end for another engine; 0 to
    free them."""
    kv_source: KvSource | None = None
    """Address of the KV cache of the first tokens at another engine; None to compute it."""
    predicted_output_tokens: Annotated[int, Meta(ge=0)] = 0
    """Predicted length of the output, `outputs` included; 0 without a prediction."""
    reports_first_chunk: bool = False
    """True if the driver has to send FirstChunkComputed; set by the engine's session with the
    router."""
    is_ticket_foreign: bool = False
    """True if a router of another project gets the ticket: no message says whether another engine
    will fetch the blocks."""
    session: Annotated[str, Meta(max_length=MAX_SESSION_CHARACTERS)] = ""
    """Name of the conversation among those of the client; empty: known by its prompt."""
    client: Annotated[str, Meta(max_length=MAX_SESSION_CHARACTERS)] = ""
    """Name of the client that sent the request, such as the number of its API key."""

    def check(self, vocab_size: int | None) -> None:
        """Check the fields that neither decoding nor the scheduler checks.

        Args:
            vocab_size: token ids have to be smaller; None for no check.

        Raises:
            ValueError: `choices` are not `n` different indices, the age is not finite, a ticket or
                source does not fit, or a token id is not in the vocabulary; the message names the
                field.
        """
        if self.choices and not len(self.choices) == len(set(self.choices)) == self.n:
            raise ValueError(f"choices has to have {self.n} different indices")
        if not 0 <= self.age_seconds < math.inf:
            raise ValueError("age_seconds has to be a number of at least 0")
        self._check_hand_off()
        if vocab_size is None:
            return
        if self.prompt and max(self.prompt) >= vocab_size:
            raise ValueError(f"prompt has ids out of the vocabulary 0..{vocab_size - 1}")
        if any(max(output, default=0) >= vocab_size for output in self.outputs):
            raise ValueError(f"outputs has ids out of the vocabulary 0..{vocab_size - 1}")
        self.sampling.check_ids(vocab_size)

    def _check_hand_off(self) -> None:
        """Check the ticket and the source of KV blocks. Raises ValueError."""
        if self.kv_ticket and self.n > 1:
            raise ValueError("kv_ticket is possible for one choice only")
        if self.kv_source is None:
            return
        least = len(self.prompt) + min(map(len, self.outputs), default=0)
        if self.kv_source.num_tokens > least:
            raise ValueError(
                f"kv_source has {self.kv_source.num_tokens} tokens, but the request only {least}"
            )


class RejectedRequest(WireMessage, frozen=True):
    """Result of decoding a SubmitRequest with an invalid field; never sent between processes."""

    seq: int
    n: int
    error: str


class AbortSequences(WireMessage, frozen=True):
    """Command to the scheduler: end sequences whose client has disconnected."""

    seqs: list[int]


class EngineOutputs(WireMessage, frozen=True):
    """New tokens, finished sequences and statistics after one step, from scheduler to frontend.

    A message without tokens and finished sequences reports statistics only.
    """

    outcome: StepOutput
    stats: SchedulerStats
    details: list[SampleDetails] = []
    """Details of sequences in the outcome that requested any."""
    error_kinds: list[tuple[int, ErrorKind]] = []
    """Sequences that ended with an error of a kind; only to a router."""
