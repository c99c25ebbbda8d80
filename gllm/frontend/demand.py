"""What the output of a chat has to be, put together from all that asks for something.

Owns the way from a demanded call, a structured answer and reasoning to one grammar. Knows nothing
of what enforces it.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gllm.config.field_types import FieldError
from gllm.config.sampling import StructuredOutput
from gllm.grammar.rewrite import rewrite_schema
from gllm.grammar.schema import check_schema
from gllm.grammar.source import Source, source_of
from gllm.text.output.constraint import Grammar, calls_of, output_of
from gllm.text.output.parser import OutputFormat
from gllm.text.tools import ToolUse

_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)
_WITHIN_SLASHES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def demand(
    asked: StructuredOutput | None,
    use: ToolUse,
    form: OutputFormat,
    template: str,
    token: Callable[[str], int | None],
) -> tuple[StructuredOutput | None, OutputFormat]:
    """What the output has to be, None for anything, and what it may hold.

    asked: what content has to be. template: the chat template's source. token: the id of a
    vocabulary's entry. Raises FieldError.
    """
    required = use.choice == "required"
    if required and asked is not None:
        if asked.grammar is not None:
            raise FieldError(
                "tool_choice",
                f"tool_choice requires a call, but the grammar of {asked.param} is about the whole "
                "output",
            )
        # The format is that of messages, of which there is none; it still has to be a good one.
        source_of(asked)
        asked = None
    if asked is not None and asked.grammar is not None:
        # The whole output is as the request's own grammar has it.
        return asked, replace(form, reasoning=None, within=False)
    if not required and (asked is None or (form.reasoning is None and form.calls is None)):
        return asked, form
    grammar = Grammar(token, form.markers)
    answers = []
    if asked is not None:
        answers.append(_content(grammar, source_of(asked)))
    if form.calls is not None:
        written = form.calls.written(template)
        several = not (use.named or use.is_single)
        answers.append(calls_of(grammar, written, _enforced_schemas(use), several))
    text = output_of(grammar, answers, form.reasoning, form.within)
    param = "tools" if asked is None else asked.param
    return StructuredOutput(grammar=text, param=param), form


def _enforced_schemas(use: ToolUse) -> dict[str, dict[str, Any]]:
    """Return the schemas of arguments, by name of the tool, as the grammar enforces them.

    What cannot be enforced is left out, but for strict functions: there it raises FieldError.
    """
    enforced = {}
    for name, schema in use.schemas.items():
        if use.named and name != use.named:
            continue
        strict = name in use.strict
        try:
            if strict:
                check_schema(schema)
            enforced[name] = rewrite_schema({"type": "object", **schema}, strict, not strict)
        except ValueError as error:
            raise FieldError("tools", f"tools: the function {name!r} is strict: {error}") from error
    return enforced


def _content(grammar: Grammar, source: Source) -> str:
    """The expression of a structured answer."""
    match source.format:
        case "json_schema":
            return grammar.rule(f"%json {source.text}")
        case "regex":
            return grammar.rule(f"/{_slashes_escaped(source.text)}/")
        case _:
            # A list of strings.
            return grammar.rule(source.text.removeprefix("start: "))


def _slashes_escaped(regex: str) -> str:
    """A regular expression as it is written between slashes. What is escaped stays so."""
    return _ESCAPE.sub(lambda found: _WITHIN_SLASHES.get(found[0], found[0]), regex)
