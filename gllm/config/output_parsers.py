"""Parsers of chat output: the names that a server and `LLM` accept."""

from dataclasses import dataclass

from gllm.options.field_types import convert_fields
from gllm.options.options import bounded_field

TOOL_CALL_PARSERS = (
    "auto",
    "none",
    "apertus",
    "cohere",
    "deepseek",
    "deepseek_v32",
    "gemma4",
    "glm4",
    "glm45",
    "granite",
    "harmony",
    "hermes",
    "hunyuan_a13b",
    "hy_v3",
    "kimi_k2",
    "lfm2",
    "llama3",
    "minimax_m2",
    "mistral",
    "nemotron",
    "qwen3_coder",
    "seed_oss",
)
"""Formats of tool calls, registered in `gllm.text.output.registry`."""
REASONING_PARSERS = (
    "auto",
    "none",
    "apertus",
    "cohere",
    "gemma4",
    "granite",
    "harmony",
    "hunyuan_a13b",
    "hy_v3",
    "mistral",
    "seed_oss",
    "think",
)
"""Tags of reasoning sections, registered in `gllm.text.output.reasoning`."""


@dataclass(frozen=True)
class OutputParserConfig:
    """Names of the parsers that extract tool calls and reasoning from chat output.

    `auto` selects the parser whose markers the chat template contains; `none` leaves the text
    unparsed.

    Raises:
        FieldError: There is no parser of this name.
    """

    tool_call_parser: str = bounded_field("auto", choices=TOOL_CALL_PARSERS)
    reasoning_parser: str = bounded_field("auto", choices=REASONING_PARSERS)

    def __post_init__(self) -> None:
        convert_fields(self)
