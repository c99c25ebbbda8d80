"""Parsers of chat output: the names that a server and `LLM` accept."""

from dataclasses import dataclass

from gllm.options.field_types import convert_fields
from gllm.options.options import bounded_field

TOOL_CALL_FORMAT_NAMES = (
    "harmony",
    "deepseek",
    "deepseek_v32",
    "kimi_k2",
    "minimax_m2",
    "gemma4",
    "lfm2",
    "apertus",
    "cohere",
    "nemotron",
    "hy_v3",
    "hunyuan_a13b",
    "granite",
    "mistral",
    "seed_oss",
    "qwen3_coder",
    "glm45",
    "hermes",
    "llama3",
    "glm4",
)
"""Modules of `gllm.text.output.families` with a format of tool calls, in the order in which `auto`
looks for them: several formats contain <tool_call>."""
REASONING_TAG_NAMES = (
    "harmony",
    "gemma4",
    "apertus",
    "cohere",
    "seed_oss",
    "hy_v3",
    "hunyuan_a13b",
    "granite",
    "think",
    "mistral",
)
"""Modules of `gllm.text.output.families` with reasoning tags, in the order in which `auto` looks
for them: the special ones first."""
TOOL_CALL_PARSERS = ("auto", "none", *sorted(TOOL_CALL_FORMAT_NAMES))
"""Values of --tool-call-parser."""
REASONING_PARSERS = ("auto", "none", *sorted(REASONING_TAG_NAMES))
"""Values of --reasoning-parser."""


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
