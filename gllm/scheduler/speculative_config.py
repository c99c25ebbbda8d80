"""Configuration of speculative decoding; the fields and their names are those of vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gllm.options.field_types import FieldError, convert_fields
from gllm.options.json_fields import create_from_fields, parse_json_fields
from gllm.options.options import bounded_field

STAGE_DRAFT_METHODS = ("draft_model", "mtp")
"""Methods whose drafts the last stage computes with weights, after it has sampled."""
DRAFT_METHODS = ("ngram", "synthetic", *STAGE_DRAFT_METHODS)
"""Values of `method`: names of gllm.scheduler.speculation.DRAFTERS."""
MAX_SPECULATIVE_TOKENS = 64
"""Most draft tokens of a window."""
DEFAULT_LOOKUP_TOKENS = 5
"""Length of n-grams if neither prompt_lookup_min nor prompt_lookup_max is given, as in vLLM."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Options of speculative decoding: the method and length of drafts."""

    num_speculative_tokens: int = bounded_field(5, ge=1, le=MAX_SPECULATIVE_TOKENS)
    """Most draft tokens of a window."""
    method: str = bounded_field("ngram", choices=DRAFT_METHODS)
    """Method of the drafts; ngram: tokens that followed the longest earlier occurrence of the last
    ones, in prompt and output; draft_model: those of a smaller model; mtp: those of the
    checkpoint's multi-token prediction head; synthetic: right at a given rate, for simulated
    texts."""
    prompt_lookup_max: int | None = bounded_field(None, ge=1, le=64)
    """ngram: most last tokens that are looked up; default: prompt_lookup_min, or 5."""
    prompt_lookup_min: int | None = bounded_field(None, ge=1, le=64)
    """ngram: fewest; default: prompt_lookup_max, or 5."""
    max_windows_in_flight: int | None = bounded_field(None, ge=1, le=64)
    """Most windows of a sequence in flight at once; default: one per pipeline stage, and 1 with
    draft_model and mtp, whose guesses for later windows are computed one after the other."""
    synthetic_acceptance_rate: float = bounded_field(0.7, ge=0, le=1)
    """synthetic: probability that a draft token is right if those before it are."""
    model: str | None = bounded_field(None)
    """draft_model: the smaller model, a folder or a name as for --model."""

    def __post_init__(self) -> None:
        """Check and convert the fields, and set the defaults. Raises FieldError."""
        convert_fields(self)
        self._check_model()
        if self.is_drafted_by_stage and self.max_windows_in_flight is None:
            object.__setattr__(self, "max_windows_in_flight", 1)
        largest = self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP_TOKENS
        object.__setattr__(self, "prompt_lookup_max", largest)
        object.__setattr__(self, "prompt_lookup_min", self.prompt_lookup_min or largest)
        if self.lookup_range.start > largest:
            raise FieldError(
                "prompt_lookup_min",
                f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max "
                f"({largest}): lower one or raise the other",
            )

    def _check_model(self) -> None:
        """Raise FieldError if `model` and `method` contradict each other."""
        if self.method == "draft_model" and self.model is None:
            raise FieldError(
                "model",
                "method draft_model needs the field model: the folder of a small model with the "
                "same vocabulary",
            )
        if self.method != "draft_model" and self.model is not None:
            raise FieldError(
                "model",
                f"model is the draft of method draft_model, but method is {self.method}: leave "
                "model out, or set method to draft_model",
            )

    @property
    def is_drafted_by_stage(self) -> bool:
        """True if the last stage computes the drafts with weights of its own."""
        return self.method in STAGE_DRAFT_METHODS

    @property
    def num_stage_drafts(self) -> int:
        """Draft tokens of all windows of a sequence in flight, if the last stage computes them."""
        if not self.is_drafted_by_stage:
            return 0
        # A window of guesses alone has one more.
        return (self.num_speculative_tokens + 1) * (self.max_windows_in_flight or 1) - 1

    @property
    def lookup_range(self) -> range:
        """Lengths of the n-grams that are looked up, the shortest first."""
        assert self.prompt_lookup_min is not None
        assert self.prompt_lookup_max is not None
        return range(self.prompt_lookup_min, self.prompt_lookup_max + 1)


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Parse the JSON object of `--speculative-config`. Raises ValueError."""
    config: SpeculativeConfig = parse_json_fields(SpeculativeConfig, text)
    return config


def to_speculative_config(value: Any) -> Any:
    """Return the configuration that a mapping stands for; other values unchanged.

    Raises:
        FieldError: the mapping is no such configuration.
    """
    if not isinstance(value, Mapping):
        return value
    try:
        return create_from_fields(SpeculativeConfig, dict(value))
    except ValueError as error:
        raise FieldError("speculative_config", f"speculative_config: {error}") from None
