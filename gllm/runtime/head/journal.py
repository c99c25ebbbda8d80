"""Journal of a request: everything that another scheduler needs to continue it.

The client keeps an entry per running request. After the death of a worker, or of an engine of a
fleet, it submits each entry again with the tokens that its reader has already received. Pure: time
is an argument.
"""

from array import array
from dataclasses import dataclass, field

import msgspec

from gllm.config.sampling import MAX_N
from gllm.messages.handoff import KvSource
from gllm.messages.requests import SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.options.slo import Slo
from gllm.scheduler.output_lengths import LengthEstimate


@dataclass(slots=True, eq=False)
class JournalEntry:
    """Request with the tokens delivered so far: all that another scheduler needs to continue it."""

    prompt: "array[int] | list[int]"
    """Token ids; an array of four bytes per token once the request is submitted."""
    sampling: SequenceSamplingParams
    """Parameters of the first choice."""
    max_tokens: int
    """Most tokens of each choice, delivered ones included."""
    stop_ids: list[int]
    n: int
    """Number of choices."""
    priority: int
    cache_salt: str
    arrival: float
    """Time of the first submission, in seconds of the caller's clock."""
    session: str = ""
    """Requests of one session have prefixes in common; for the choice of an engine, and of the
    cached blocks that are kept."""
    slo: Slo | None = None
    """Service-level objective, for the choice of an engine."""
    engine: str = ""
    """Name of the engine that has the request, or had it last; empty if it is the only one."""
    numerics: str = ""
    """Digest of the numerics that the delivered tokens depend on; only engines of the same digest
    continue them. Empty while no engine has left tokens behind."""
    kv_ticket: int = 0
    """As in SubmitRequest; stored, because a scheduler that computes the request again needs it."""
    is_ticket_foreign: bool = False
    """As in SubmitRequest."""
    kv_source: KvSource | None = None
    """As in SubmitRequest; for the next submission only, because a ticket is used once."""
    predicted_output_tokens: int = 0
    """As in SubmitRequest."""
    client: str = ""
    """As in SubmitRequest."""
    length_estimate: LengthEstimate | None = None
    """Predicted length of each output; None before the first prediction."""
    reports_first_chunk: bool = False
    """As in SubmitRequest."""
    alive: set[int] = field(init=False)
    """Choices that have not ended."""
    outputs: dict[int, list[int]] = field(init=False)
    """Token ids delivered, by choice. Appending to a list is faster than to an array."""
    num_cached_tokens: int | None = None
    """Prompt tokens in the prefix cache of the engine that has computed the prompt, if another one
    samples the first tokens; None if that one reports them."""
    started: set[int] = field(default_factory=set)
    """Choices whose first token, with its cached tokens and queueing time, was delivered."""
    prompt_logprobs_sent: bool = False
    """True if the log-probabilities of the prompt were delivered."""
    embedding_sent: bool = False
    """True if the embedding was delivered."""
    seqs: dict[int, int] = field(default_factory=dict)
    """Wire id of each submitted choice; empty while the request is parked."""
    num_attempts: int = 0
    """Number of submissions."""
    num_refusals: int = 0
    """Times that engines returned the request without a new token, since its last token."""

    def __post_init__(self) -> None:
        self.alive = set(range(self.n))
        self.outputs = {choice: [] for choice in range(self.n)}

    @classmethod
    def from_submission(cls, message: SubmitRequest, arrival: float) -> "JournalEntry":
        """Return the entry of a request that another process has submitted.

        Args:
            message: submission, perhaps with the tokens that other engines have generated. Its
                choices keep their indices.
            arrival: time of the first submission, in seconds of the caller's clock.

        Raises:
            ValueError: choices or outputs do not fit each other, or there are too many choices.
        """
        if message.n > MAX_N:
            raise ValueError(f"n is {message.n}, but at most {MAX_N} choices are possible")
        message.check(None)
        choices = message.choices or list(range(message.n))
        if choices != sorted(choices):
            raise ValueError("choices has to be in ascending order")
        if message.outputs and len(message.outputs) != message.n:
            raise ValueError(f"outputs has to have {message.n} lists, one for each sequence")
        entry = cls(
            message.prompt,
            message.sampling,
            message.max_tokens,
            message.stop_ids,
            message.n,
            message.priority,
            message.cache_salt,
            arrival,
        )
        outputs = message.outputs or [[] for _ in choices]
        entry.kv_ticket, entry.kv_source = message.kv_ticket, message.kv_source
        entry.is_ticket_foreign = message.is_ticket_foreign
        entry.predicted_output_tokens = message.predicted_output_tokens
        entry.session, entry.client = message.session, message.client
        entry.n = choices[-1] + 1
        entry.alive = set(choices)
        entry.outputs = dict(zip(choices, outputs, strict=True))
        return entry

    @property
    def num_output_tokens(self) -> int:
        """Tokens delivered, of all choices."""
        return sum(map(len, self.outputs.values()))

    @property
    def is_moved(self) -> bool:
        """True if a scheduler has had the request, so that it continues at the next one."""
        return bool(self.num_attempts or self.num_output_tokens)

    @property
    def is_parked(self) -> bool:
        """True if no scheduler has the request."""
        return not self.seqs

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that the next scheduler has to prefill; the choices share the prompt."""
        return len(self.prompt) + sum(len(self.outputs[choice]) for choice in self.alive)

    def submission(self, first_seq: int, now: float, request_id: str = "") -> SubmitRequest:
        """Return the message that starts the request or resumes its unfinished choices.

        Args:
            first_seq: wire id of the first living choice; the others follow without gaps.
            now: time in seconds of the clock of `arrival`.
            request_id: id of the request, for the logs of the receiver.
        """
        choices = sorted(self.alive)
        outputs = [self.outputs[choice].copy() for choice in choices]
        sampling = self.sampling
        # Without details of the prompt that were delivered.
        if self.prompt_logprobs_sent:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        if self.embedding_sent:
            sampling = msgspec.structs.replace(sampling, embeds=False)
        return SubmitRequest(
            first_seq,
            self.prompt.tolist() if isinstance(self.prompt, array) else self.prompt,
            sampling,
            self.max_tokens,
            self.stop_ids,
            len(choices),
            self.priority,
            self.cache_salt,
            choices=choices if len(choices) < self.n else [],
            outputs=outputs if any(outputs) else [],
            age_seconds=now - self.arrival,
            request_id=request_id,
            kv_ticket=self.kv_ticket,
            kv_source=self.kv_source,
            predicted_output_tokens=self.predicted_output_tokens,
            reports_first_chunk=self.reports_first_chunk,
            is_ticket_foreign=self.is_ticket_foreign,
            session=self.session,
            client=self.client,
        )

    def on_submitted(self, first_seq: int) -> None:
        """Assign wire ids to the unfinished choices."""
        self.num_attempts += 1
        self.kv_source = None
        self.seqs = {choice: first_seq + i for i, choice in enumerate(sorted(self.alive))}
