"""What the frontend may ask of an engine, and in which terms.

Owns the types both sides share and the checks that either may run first. Knows nothing of HTTP and
of processes: a test's fake engine satisfies the protocol as the real one does.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from gllm.config.field_types import FieldError, to_int, to_str
from gllm.config.limits import MAX_PROMPT_LOGPROBS
from gllm.config.sampling import SamplingParams
from gllm.messages.reports import BubbleReport, StageUtilization
from gllm.messages.sampling import TokenLogprobs
from gllm.scheduler.plan import Stats
from gllm.text.tokenizer import Tokenizer, TooManyTokens


class Delta(msgspec.Struct, frozen=True):
    """One increment of one choice."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """stop, length, abort or error; set on a choice's last delta."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the choice, where one did."""
    error: str = ""
    """What went wrong, with finish_reason `error`."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; set on a choice's first delta."""
    queue_seconds: float = 0.0
    """From arrival to the first micro-batch; set on a choice's first delta."""
    logprobs: list[TokenLogprobs] = []
    """Of each of `token_ids`, where they were asked for."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Of the prompt's tokens from the second on, where they were asked for; set on a choice's first
    delta."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What clients are told of the model, and what requests are checked against."""

    name: str
    """The name clients ask for."""
    max_model_len: int
    """Tokens of prompt and output together, at most."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    defaults: Mapping[str, Any]
    """Sampling defaults of the model's generation_config, by field name."""
    created: int
    """Unix seconds."""


class EngineUnavailable(Exception):
    """The engine takes no request now. `reason` is loading, draining, dead or full."""

    def __init__(self, reason: str, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class EmbeddingError(Exception):
    """A prompt whose embedding cannot be computed; the message says why."""


class ProfileError(Exception):
    """A profile that cannot begin or end; the message says why."""


class PromptTooLong(FieldError):
    """A prompt that leaves no room for output in the model's context."""


class RequestLike(Protocol):
    """A request that runs. What nobody takes is coalesced, into one delta for each choice."""

    def listen(self, news: Callable[[], None]) -> None:
        """Call this whenever something has come and nothing was there, at once if something is
        there; it must not raise. All of a step has come by then, and is taken best right away:
        tasks that wait for it would cost more than the tokens."""

    def take(self) -> list[Delta]:
        """What came since the last call."""

    def close(self) -> None:
        """Nobody takes any more; choices that have not ended are aborted."""


class EngineLike(Protocol):
    """An engine as the frontend sees it."""

    @property
    def model(self) -> ModelInfo: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def state(self) -> str:
        """loading, ready, draining or dead."""

    @property
    def cause(self) -> str:
        """Why the engine is dead."""

    @property
    def num_requests(self) -> int:
        """Requests that have not been closed."""

    @property
    def stats(self) -> Stats: ...

    @property
    def step_sizes(self) -> Mapping[int, int]:
        """Micro-batches so far, by their tokens rounded up to a power of two."""

    @property
    def stage_loads(self) -> Mapping[int, StageUtilization]:
        """What each stage computed so far, by stage."""

    @property
    def bubbles(self) -> BubbleReport:
        """What the pipeline lost so far."""

    def healthy(self) -> bool:
        """Whether the engine lives and no pending work is stuck."""

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
    ) -> Sequence[RequestLike]:
        """Begin a request for each prompt, all or none; each has to be closed.

        Raises FieldError for what cannot be, EngineUnavailable.
        """

    async def embed(
        self,
        prompt: str | list[int],
        *,
        priority: int = 0,
        cache_salt: str = "",
        request_id: str = "",
    ) -> list[float]:
        """What the model knows at the prompt's last token: its hidden state behind the final norm,
        as many numbers as the model is wide.

        Raises FieldError, EngineUnavailable, and EmbeddingError where it cannot be computed.
        """

    def abort(self, request_id: str | None) -> int:
        """End the requests of this id, all for None, with reason `abort`; the number of them."""

    async def reset_prefix_cache(self) -> None:
        """Forget what the prefix cache holds. Raises EngineUnavailable."""

    async def profile(self, folder: str) -> None:
        """Let every stage record what it computes, for a file in this folder; an empty one ends
        that and writes the files. Raises EngineUnavailable, ProfileError where a stage cannot."""

    def info(self) -> dict[str, Any]:
        """What runs here, as JSON values."""


def truncated(prompt: list[int], params: SamplingParams, model: ModelInfo) -> list[int]:
    """What `truncate_prompt_tokens` leaves of a prompt."""
    kept = params.truncate_prompt_tokens
    if kept is None:
        return prompt
    if kept == -1:
        kept = max(1, model.max_model_len - (params.max_tokens or 1))
    return prompt[-kept:]


def check_options(
    params: SamplingParams, priority: int, cache_salt: str, request_id: str
) -> tuple[int, str]:
    """Check what a caller passes beside the prompt; return the priority and the cache salt with
    exactly their types. Raises FieldError."""
    is_sampling: object = isinstance(params, SamplingParams)
    if not is_sampling:
        given = type(params).__name__
        raise FieldError("params", f"params is of type {given}, but has to be SamplingParams")
    to_str("request_id", request_id)
    converted = to_int("priority", priority)
    if not -(2**63) <= converted < 2**63:
        raise FieldError("priority", "priority has to be a 64-bit signed integer")
    return converted, to_str("cache_salt", cache_salt)


def encode_prompt(
    text: str,
    params: SamplingParams,
    model: ModelInfo,
    tokenizer: Tokenizer,
    param: str = "prompt",
) -> list[int]:
    """Return a prompt's token ids, as `truncate_prompt_tokens` leaves them. For a thread.

    Raises PromptTooLong, without tokenizing a text that cannot fit.
    """
    with prompt_limit(param, model):
        most = None if params.truncate_prompt_tokens is not None else model.max_model_len - 1
        return truncated(tokenizer.encode(text, max_tokens=most), params, model)


@contextmanager
def prompt_limit(param: str, model: ModelInfo) -> Iterator[None]:
    """Raise PromptTooLong in place of TooManyTokens."""
    try:
        yield
    except TooManyTokens as error:
        raise _too_long(param, error.count, model, error.is_exact) from None


def _too_long(param: str, count: int, model: ModelInfo, is_exact: bool = True) -> PromptTooLong:
    return PromptTooLong(
        param,
        f"{param} has {'' if is_exact else 'at least '}{count} tokens, but this model's maximum "
        f"context length is {model.max_model_len} tokens, of which at least one has to be left for "
        "the output",
    )


def check_request(
    prompt: Sequence[int], params: SamplingParams, model: ModelInfo, param: str = "prompt"
) -> None:
    """Whether the model can run this request; `param` is the prompt's field name.

    Raises FieldError, PromptTooLong among them.
    """
    if not prompt:
        raise FieldError(param, f"{param} is empty: at least one token is needed")
    if len(prompt) + 1 > model.max_model_len:
        raise _too_long(param, len(prompt), model)
    if params.prompt_logprobs is not None:
        scored = len(prompt) * (params.prompt_logprobs + 1)
        if scored > MAX_PROMPT_LOGPROBS:
            raise FieldError(
                "prompt_logprobs",
                f"{len(prompt)} prompt tokens with prompt_logprobs {params.prompt_logprobs} are "
                f"{scored} log-probabilities, but at most {MAX_PROMPT_LOGPROBS} are allowed",
            )
    named: tuple[tuple[str, Collection[int]], ...] = (
        (param, prompt),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", params.logit_bias),
    )
    for name, ids in named:
        if ids and not (min(ids) >= 0 and max(ids) < model.vocab_size):
            raise FieldError(
                name, f"{name} has ids out of the vocabulary 0..{model.vocab_size - 1}"
            )
