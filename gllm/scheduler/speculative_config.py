"""Configuration of speculative decoding; the fields and their names are those of vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gllm.options.field_types import FieldError, convert_fields
from gllm.options.json_fields import create_from_fields, parse_json_fields
from gllm.options.options import bounded_field

DRAFT_METHODS = ("ngram", "synthetic")
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
    ones, in prompt and output; synthetic: right at a given rate, for simulated texts."""
    prompt_lookup_max: int | None = bounded_field(None, ge=1, le=64)
    """ngram: most last tokens that are looked up; default: prompt_lookup_min, or 5."""
    prompt_lookup_min: int | None = bounded_field(None, ge=1, le=64)
    """ngram: fewest; default: prompt_lookup_max, or 5."""
    max_windows_in_flight: int | None = bounded_field(None, ge=1, le=64)
    """Most windows of a sequence in flight at once; default: one per pipeline stage."""
    synthetic_acceptance_rate: float = bounded_field(0.7, ge=0, le=1)
    """synthetic: probability that a draft token is right if those before it are."""

    def __post_init__(self) -> None:
        """Check and convert the fields, and set the defaults. Raises FieldError."""
        convert_fields(self)
        largest = self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP_TOKENS
        object.__setattr__(self, "prompt_lookup_max", largest)
        object.__setattr__(self, "prompt_lookup_min", self.prompt_lookup_min or largest)
        if self.lookup_range.start > largest:
            raise FieldError(
                "prompt_lookup_min",
                f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max "
                f"({largest}): lower one or raise the other",
            )

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
