"""Parameters of one request: how its tokens are sampled, when it ends, which grammar it follows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gllm.config.field_types import FieldError, constraint_error, convert_fields
from gllm.config.limits import MAX_LOGPROBS, check_sampling_sizes
from gllm.config.options import INT32_MAX, INT64_MAX, bounded_field

MAX_N = 16384
"""Largest number of choices of one request; a server allows fewer (`--max-choices`)."""


@dataclass(frozen=True)
class StructuredOutput:
    """What an output has to be, exactly one of: `json` that fits a JSON Schema, which is given as
    values or as text; a match of a regular expression; one of several strings; a text of a grammar
    in Lark or GBNF. docs/structured-output.md has what each may hold.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    param: str = "structured"
    """The request's field that asks for it, for errors."""
    strict: bool = False
    """Close every object of the JSON Schema that does not say so itself, also one that lists no
    properties."""

    def __post_init__(self) -> None:
        """Raises FieldError for a value of another type, and unless there is exactly one."""
        convert_fields(self)
        given = [self.json, self.regex, self.choice, self.grammar]
        if sum(one is not None for one in given) != 1:
            raise FieldError(
                self.param, f"{self.param} needs exactly one of json, regex, choice and grammar"
            )


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn and when it ends. None of `max_tokens`: up to the context.

    `n` choices are drawn independently. `stop` strings are cut off the text unless
    `include_stop_str_in_output`; `stop_token_ids` end it as the model's own end-of-sequence ids do,
    which `ignore_eos` switches off.

    `repetition_penalty` is over prompt and output, `presence_penalty` and `frequency_penalty` are
    over the output. `logit_bias` is by token id; `allowed_token_ids` are the only ones drawn;
    `bad_words` never come out. `logprobs` and `prompt_logprobs`: how many of the likeliest tokens
    to tell with each token, None for none of it. `truncate_prompt_tokens` keeps the prompt's last
    so many tokens, -1 as many as leave room for the output. `shown_tokens` are special tokens that
    are text although `skip_special_tokens`. `structured` says what the output has to be; it ends
    where nothing can follow, whatever `ignore_eos` says.

    Numbers and arrays of numpy are converted; a float for an integer, 3.0 too, or a boolean for a
    number is refused, and so is NaN. One string stands for a sequence of it; None for an empty one.
    """

    temperature: float = bounded_field(1.0, ge=0, le=2)
    top_p: float = bounded_field(1.0, gt=0, le=1)
    top_k: int = bounded_field(-1, ge=-1, le=INT32_MAX)
    min_p: float = bounded_field(0.0, ge=0, le=1)
    seed: int | None = bounded_field(None, ge=-(2**63), le=INT64_MAX)
    n: int = bounded_field(1, ge=1, le=MAX_N)
    max_tokens: int | None = bounded_field(None, ge=1, le=INT32_MAX)
    min_tokens: int = bounded_field(0, ge=0, le=INT32_MAX)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = bounded_field((), ge=0, le=INT32_MAX)
    ignore_eos: bool = False
    repetition_penalty: float = bounded_field(1.0, gt=0)
    presence_penalty: float = bounded_field(0.0, ge=-2, le=2)
    frequency_penalty: float = bounded_field(0.0, ge=-2, le=2)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = bounded_field(None, ge=0, le=INT32_MAX)
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = bounded_field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = bounded_field(None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = bounded_field(None, ge=-1, le=INT32_MAX)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    shown_tokens: tuple[str, ...] = ()
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        """Raises FieldError for a value of another type or out of its range."""
        convert_fields(self)
        check_sampling_sizes(self)
        if self.min_tokens:
            limit = self.max_tokens
            self._check("min_tokens", limit is None or self.min_tokens <= limit, "in 0..max_tokens")
            rule = "0 with structured output, which ends by its own rules"
            self._check("min_tokens", self.structured is None, rule)
        self._check("stop", all(self.stop), "non-empty strings")
        self._check("bad_words", all(self.bad_words), "non-empty strings")
        if self.logit_bias:
            ids_fit = all(0 <= i <= INT32_MAX for i in self.logit_bias)
            self._check("logit_bias", ids_fit, "token ids, 0 or above")
            biases_fit = all(-100 <= bias <= 100 for bias in self.logit_bias.values())
            self._check("logit_bias", biases_fit, "token ids with values in [-100, 100]")
        # That ids are in the vocabulary is for the model to say.
        self._check("allowed_token_ids", self.allowed_token_ids != (), "None or some token ids")
        self._check("truncate_prompt_tokens", self.truncate_prompt_tokens != 0, "-1 or >= 1")

    def _check(self, name: str, good: bool, rule: str) -> None:
        if not good:
            raise constraint_error(name, getattr(self, name), rule)
