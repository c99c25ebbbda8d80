"""Parameters of one request: how its tokens are sampled, when it ends, which grammar it follows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gllm.options.field_types import FieldError, constraint_error, convert_fields
from gllm.options.limits import MAX_LOGPROBS, check_sampling_sizes
from gllm.options.options import INT32_MAX, INT64_MAX, bounded_field

MAX_N = 16384
"""Maximum number of choices per request; a server allows fewer (`--max-choices`)."""


@dataclass(frozen=True)
class StructuredOutput:
    """Constraint on the generated text: a JSON schema, a regular expression, choices or a grammar.

    Exactly one of these four fields is set. docs/structured-output.md lists the supported features.
    """

    json: Mapping[str, Any] | str | None = None
    """JSON Schema, as values or as text."""
    regex: str | None = None
    """Regular expression that the whole output matches."""
    choice: tuple[str, ...] | None = None
    """Allowed outputs; the output is exactly one of these strings."""
    grammar: str | None = None
    """Grammar in Lark or GBNF."""
    param: str = "structured"
    """Name of the request's field, for errors."""
    strict: bool = False
    """Forbid additional properties in every object of the JSON Schema that does not specify it."""

    def __post_init__(self) -> None:
        """Check the fields. Raises FieldError unless exactly one constraint is set."""
        convert_fields(self)
        constraints = [self.json, self.regex, self.choice, self.grammar]
        if sum(constraint is not None for constraint in constraints) != 1:
            raise FieldError(
                self.param, f"{self.param} needs exactly one of json, regex, choice and grammar"
            )


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; names and meanings are those of vLLM.

    Numbers and arrays of numpy are converted. Values of wrong types are refused: a float (also 3.0)
    for an integer, a boolean for a number, NaN. For a tuple, a string is converted to a tuple with
    one item, and None to an empty one.

    Attributes:
        n: Number of choices, sampled independently.
        max_tokens: Maximum number of output tokens; None for the rest of the context.
        stop: Strings that end the output; cut off unless `include_stop_str_in_output` is set.
        stop_token_ids: Token ids that end the output like the model's EOS.
        ignore_eos: Do not end at EOS, unless `structured` is set.
        repetition_penalty: Penalty of tokens in the prompt and the output.
        presence_penalty: Penalty of tokens in the output.
        frequency_penalty: Penalty per occurrence in the output.
        logit_bias: Values added to the logits, by token id.
        allowed_token_ids: The only token ids that may be sampled; None for all.
        bad_words: Words that are never generated.
        logprobs: Number of most likely tokens returned with each output token; None for no
            log-probabilities.
        prompt_logprobs: The same for prompt tokens.
        truncate_prompt_tokens: Keep this many of the prompt's last tokens; -1: as many as leave
            space for the output.
        shown_tokens: Special tokens that stay in the text although `skip_special_tokens` is set.
        continues_prompt: The output continues the prompt's text, so that its first word may begin
            with a space; False for a text of its own, such as the answer of a chat.
        structured: Constraint on the output.
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
    continues_prompt: bool = True
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        """Convert and check the fields. Raises FieldError."""
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
        # check_request checks that ids are in the vocabulary.
        self._check("allowed_token_ids", self.allowed_token_ids != (), "None or some token ids")
        self._check("truncate_prompt_tokens", self.truncate_prompt_tokens != 0, "-1 or >= 1")

    def _check(self, name: str, good: bool, rule: str) -> None:
        if not good:
            raise constraint_error(name, getattr(self, name), rule)
