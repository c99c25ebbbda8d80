"""Every message that crosses a process border, and the codec.

Owns the wire format: msgpack with a schema for each message, checked on arrival, never pickle.
Knows nothing of sockets (runtime/bus.py) and of what the messages cause.
"""

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gllm.scheduler.plan import Outcome, Stats, StepPlan, StepResult, StepTime

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""What an array of int64 holds; the wire itself takes unsigned numbers too."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the last stage draws the tokens of one sequence."""

    temperature: float = 1.0
    """0 means greedy."""
    top_k: Int64 = 0
    """0 means off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Int64 = 0
    """Any 64-bit signed integer; always set by the time it gets here."""
    choice: int = 0
    """Index of the sequence among its request's choices; part of the random counter."""
    min_tokens: int = 0
    """`banned` tokens are not drawn before this many tokens were generated."""
    banned: tuple[TokenId, ...] = ()
    """Token ids that would end the sequence."""
    repetition_penalty: float = 1.0
    """Over prompt and output; 1 means off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[TokenId, float] = {}
    """By token id."""
    allowed: tuple[TokenId, ...] = ()
    """The only token ids that may be drawn; empty means all."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Token sequences whose last token is not drawn after the rest of them."""
    logprobs: int | None = None
    """Likeliest tokens told with each token drawn; None: no log-probabilities at all."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt; told by the first choice alone."""
    embeds: bool = False
    """Tell the prompt's embedding with the first token."""
    grammar: str = ""
    """What the output has to fit, as gllm/grammar/compiler.py gives it; empty: anything."""

    def check_ids(self, vocab_size: int) -> None:
        """Raise ValueError, naming the field, for token ids outside of the vocabulary.

        `banned` may hold such ids: those of EOS come from the model's files.
        """
        words = tuple(token for word in self.bad_words for token in word)
        named = {"logit_bias": self.logit_bias, "allowed": self.allowed, "bad_words": words}
        for name, ids in named.items():
            if ids and max(ids) >= vocab_size:
                raise ValueError(f"{name} has ids out of the vocabulary 0..{vocab_size - 1}")

    @property
    def needs_prompt(self) -> bool:
        """Whether the last stage has to know the prompt."""
        return self.repetition_penalty != 1 or self.prompt_logprobs is not None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was at its place, and which were the likeliest there.

    Natural logarithms of the model's probabilities, before penalties and temperature.
    """

    token: int
    logprob: float
    rank: int
    """1 for the likeliest token."""
    top_ids: list[int]
    """Likeliest first."""
    top_logprobs: list[float]


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """What a sampling row has to tell besides its token."""

    seq: int
    drawn: TokenLogprobs | None
    prompt: list[TokenLogprobs]
    """Of the prompt's tokens from the second on, with the sequence's first token; else empty."""
    embedding: bytes = b""
    """[hidden] float32, little-endian: the hidden state of the prompt's last token behind the final
    norm, with the sequence's first token where it was asked for; else empty."""


# Frontend to driver.


class Submit(Message, frozen=True):
    """A request. Its choices are the sequences seq .. seq + n - 1."""

    seq: int
    prompt: list[TokenId]
    sampling: Sampling
    max_tokens: int
    """Tokens to generate at most, for each choice; prompt + max_tokens fit the context."""
    stop_ids: list[TokenId]
    """Token ids that end a sequence, those of EOS among them unless the request ignores EOS."""
    n: Annotated[int, Meta(ge=1)] = 1
    priority: int = 0
    """Smaller runs earlier."""
    cache_salt: str = ""


class Rejected(Message, frozen=True):
    """A Submit that could not be decoded; `decode` returns it, nobody sends it."""

    seq: int
    n: int
    error: str


class Abort(Message, frozen=True):
    """Sequences nobody waits for any more."""

    seqs: list[int]


class ForgetPrefixes(Message, frozen=True):
    """Empty the prefix cache; Done is the answer."""

    question: int


class Profile(Message, frozen=True):
    """To every stage: record what is computed, or end that and write it down; Done answers each."""

    question: int
    folder: str
    """Where each stage's record goes; empty: end."""


# Driver to stages.


class Register(Message, frozen=True):
    """A sequence that plans will name; fields the receiving stage has no use for are empty."""

    seq: int
    prompt_len: int
    prompt: list[int] = []
    sampling: Sampling | None = None
    n: int = 1
    """It stands for n sequences, seq .. seq + n - 1, whose `choice` counts up."""


class Step(Message, frozen=True):
    """The metadata of a micro-batch, sent ahead of its activations."""

    plan: StepPlan


# Last stage to driver.


class Result(Message, frozen=True):
    """The tokens of a micro-batch."""

    result: StepResult
    logprobs: list[RowLogprobs] = []
    """Of the rows that were asked for them."""


class Begun(Message, frozen=True):
    """The grammar of a registered request is compiled; or, with an error, a registered request
    cannot be sampled."""

    seq: int
    error: str = ""
    n: int = 1
    """As in its Register."""


# Stages to driver.


class Linked(Message, frozen=True):
    """The first message of a stage to the driver: the way is open."""

    stage: int


class StageTimes(Message, frozen=True):
    """When a stage computed the steps since its last message."""

    stage: int
    steps: list[StepTime]
    until: float
    """Every step that it began before this time has been told."""


# Driver to frontend.


class Tokens(Message, frozen=True):
    """What a commit brought, for all its sequences at once; an empty outcome brings statistics."""

    outcome: Outcome
    stats: Stats
    logprobs: list[RowLogprobs] = []
    """Of sequences in the outcome that asked for them."""


class Bubbles(Message, frozen=True):
    """What the pipeline lost since its start, as gllm.bubbles defines it."""

    seconds: list[float] = []
    """Of each stage."""
    work_seconds: float = 0.0
    """Time in which there was work for at least one stage."""


# Workers to parent, and back.


class Progress(Message, frozen=True):
    """How far a stage's loading is, in bytes."""

    stage: int
    done: int
    total: int


class Loaded(Message, frozen=True):
    """A stage has its weights."""

    stage: int
    weight_bytes: int
    block_bytes: int
    """Bytes of one KV block of the stage's layers."""
    room: int | None = None
    """Bytes for KV blocks in memory of the stage's own; None where stages share the machine's."""


class Start(Message, frozen=True):
    """The number of KV blocks, the same on every stage."""

    num_blocks: int


class Ready(Message, frozen=True):
    """A stage has its KV cache and takes plans."""

    stage: int


class Fatal(Message, frozen=True):
    """A worker cannot go on."""

    stage: int
    cause: str


class StageLoad(Message, frozen=True):
    """What a stage computed since its start."""

    stage: int
    steps: int
    busy_seconds: float
    """Time spent computing; on a device by its own clock, within each step's graph or layers and
    within its sampling."""
    host_seconds: float = 0.0
    """On a device: time that the host took to build steps and to put their work into its queues."""
    compilations: int = 0
    """On a device: kernels that were compiled since the stage is ready."""


class Done(Message, frozen=True):
    """A stage has done what the frontend asked for."""

    question: int
    """Number of the message that this answers."""
    stage: int
    error: str = ""
    """Why it could not."""


class Shutdown(Message, frozen=True):
    """End this process."""


AnyMessage = (
    Submit
    | Rejected
    | Abort
    | ForgetPrefixes
    | Profile
    | Done
    | Register
    | Step
    | Result
    | Begun
    | Linked
    | StageTimes
    | Tokens
    | Bubbles
    | Progress
    | Loaded
    | Start
    | Ready
    | Fatal
    | StageLoad
    | Shutdown
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The message as msgpack."""
    return _encoder.encode(message)


def decode(payload: bytes) -> AnyMessage:
    """Return the message in a payload; Rejected for a Submit with a field that cannot be read.

    Raises msgspec.DecodeError for anything else that is no message.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        if rejected := _rejected(payload, str(error)):
            return rejected
        raise


def _rejected(payload: bytes, error: str) -> Rejected | None:
    """Return the rejection of a Submit that is readable as far as its sequence ids."""
    fields: Any = msgspec.msgpack.decode(payload)
    if not isinstance(fields, list) or len(fields) < 2 or fields[0] != Submit.__name__:
        return None
    seq = fields[1]
    if not isinstance(seq, int) or seq < 0:
        return None
    place = 1 + Submit.__struct_fields__.index("n")
    count = fields[place] if len(fields) > place else 1
    count = count if isinstance(count, int) and count > 0 else 1
    return Rejected(seq, count, f"the request cannot be read: {_with_field_names(error)}")


def _with_field_names(error: str) -> str:
    """Replace the places in an array-like Submit by the names of its fields."""

    def name(match: re.Match[str]) -> str:
        outer = Submit.__struct_fields__[int(match[1]) - 1]
        if outer != "sampling" or match[2] is None:
            return f"`{outer}`"
        return f"`{outer}.{Sampling.__struct_fields__[int(match[2])]}`"

    return re.sub(r"`\$\[(\d+)\](?:\[(\d+)\])?[^`]*`", name, error)
