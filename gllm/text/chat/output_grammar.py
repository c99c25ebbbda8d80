"""Build the output grammar of a chat request.

Combines a required tool call, a structured answer and the reasoning section into one grammar.
`gllm.text.grammar` compiles and enforces it.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gllm.config.sampling import StructuredOutput
from gllm.options.field_types import FieldError
from gllm.text.chat.tools import ToolOptions
from gllm.text.grammar.sources.json_schema import check_schema
from gllm.text.grammar.sources.rewrite import rewrite_schema
from gllm.text.grammar.sources.structured_output import GrammarSource, to_grammar_source
from gllm.text.output.grammar_builder import (
    GrammarBuilder,
    add_tool_call_rule,
    build_output_grammar,
)
from gllm.text.output.parser import OutputFormat

_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)
_WITHIN_SLASHES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
"""Replacements for the characters that cannot stand in a regular expression between slashes."""


def constrain_output(
    structured: StructuredOutput | None,
    tool_options: ToolOptions,
    output_format: OutputFormat,
    template_source: str,
    token_id: Callable[[str], int | None],
) -> tuple[StructuredOutput | None, OutputFormat]:
    """Build the output grammar of a chat from its response format, tool choice and reasoning.

    Args:
        structured: Response format of the request: JSON Schema, regex, choice or grammar.
        tool_options: Tools and tool choice of the request.
        output_format: Reasoning tags and tool call format of the model.
        template_source: Source of the chat template, which decides how tool calls are written.
        token_id: Returns the id of a token; None if the vocabulary does not have it.

    Returns:
        The grammar, or None if the output is not constrained; and the output format to parse.

    Raises:
        FieldError: The requirements are invalid or contradict each other.
    """
    is_call_required = tool_options.choice == "required"
    if is_call_required and structured is not None:
        if structured.grammar is not None:
            raise FieldError(
                "tool_choice",
                "tool_choice requires a tool call, but the grammar of "
                f"{structured.param} applies to the whole output",
            )
        # The structure applies to content, which a required call leaves empty. It is still checked.
        to_grammar_source(structured)
        structured = None
    if structured is not None and structured.grammar is not None:
        # A grammar of the request's own covers the whole output: nothing is split off it.
        return structured, replace(output_format, reasoning_tags=None, starts_in_reasoning=False)
    call_format = output_format.tool_call_format
    has_sections = output_format.reasoning_tags is not None or call_format is not None
    if not is_call_required and (structured is None or not has_sections):
        return structured, output_format
    grammar = GrammarBuilder(token_id, output_format.markers)
    answers = []
    if structured is not None:
        content = _content_rule(grammar, to_grammar_source(structured))
        prefix = "" if call_format is None else grammar.literal(call_format.content_prefix)
        answers.append(f"{prefix} {content}" if prefix else content)
    if call_format is not None and output_format.tool_schemas:
        delimiters = call_format.delimiters(template_source)
        allows_several = not (tool_options.required_tool or tool_options.is_single_call)
        schemas = _enforced_schemas(tool_options)
        try:
            answers.append(
                add_tool_call_rule(
                    grammar, delimiters, schemas, allows_several, tool_options.strict_functions
                )
            )
        except ValueError as error:
            raise FieldError("tools", f"tools: {error}") from error
    text = build_output_grammar(
        grammar, answers, output_format.reasoning_tags, output_format.starts_in_reasoning
    )
    param = "tools" if structured is None else structured.param
    return StructuredOutput(grammar=text, param=param), output_format


def _enforced_schemas(tool_options: ToolOptions) -> dict[str, dict[str, Any]]:
    """Return the schemas of arguments as the grammar enforces them, by name of the tool.

    Keywords that cannot be enforced are dropped, except for strict functions.

    Raises:
        FieldError: The schema of a strict function has a keyword that cannot be enforced.
    """
    enforced = {}
    for name, schema in tool_options.schemas.items():
        if tool_options.required_tool and name != tool_options.required_tool:
            continue
        is_strict = name in tool_options.strict_functions
        try:
            if is_strict:
                check_schema(schema)
            enforced[name] = rewrite_schema(
                {"type": "object", **schema}, is_strict, lenient=not is_strict
            )
        except ValueError as error:
            raise FieldError("tools", f"tools: the function {name!r} is strict: {error}") from error
    return enforced


def _content_rule(grammar: GrammarBuilder, source: GrammarSource) -> str:
    """Add a rule for structured content and return its name."""
    match source.format:
        case "json_schema":
            return grammar.add_rule(f"%json {source.text}")
        case "regex":
            # Existing escapes stay.
            text = _ESCAPE.sub(lambda match: _WITHIN_SLASHES.get(match[0], match[0]), source.text)
            return grammar.add_rule(f"/{text}/")
        case _:
            # A list of strings.
            return grammar.add_rule(source.text.removeprefix("start: "))
