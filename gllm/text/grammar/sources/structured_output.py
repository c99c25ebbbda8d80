"""Convert a StructuredOutput into a grammar source, with all checks that need no compiler."""

import json
from typing import NamedTuple

from gllm.config.sampling import StructuredOutput
from gllm.options.field_types import FieldError
from gllm.text.grammar.sources.json_schema import MAX_DEPTH, check_schema, compute_nesting_depth
from gllm.text.grammar.sources.rewrite import rewrite_schema

MAX_BYTES = {"json": 2**17, "regex": 2**13, "choice": 2**16, "grammar": 2**16}
"""Size limit of each kind of source, in bytes of UTF-8."""
MAX_CHOICES = 4096
"""Largest number of strings of `choice`."""
JSON_STYLE = {"whitespace_flexible": False}
"""Style of JSON: without whitespace, so that the schema forces many tokens and a model cannot write
blanks forever."""


class GrammarSource(NamedTuple):
    """Grammar to compile: its format, such as json_schema, regex or lark, and its text."""

    format: str
    """json_schema, regex, lark or gbnf."""
    text: str


def to_grammar_source(structured: StructuredOutput) -> GrammarSource:
    """Validate a request's structured output option and convert it into a grammar to compile.

    Raises:
        FieldError: The schema, expression, choice or grammar is invalid; the error names the
            request's field.
    """
    try:
        if structured.json is not None:
            return GrammarSource("json_schema", _schema_text(structured.json, structured.strict))
        if structured.regex is not None:
            return GrammarSource("regex", _check_bounds("regex", structured.regex))
        if structured.choice is not None:
            return GrammarSource("lark", _choice_grammar(structured.choice))
        assert structured.grammar is not None, "a structured output has exactly one of four values"
        text = _check_bounds("grammar", structured.grammar)
        return GrammarSource("gbnf" if "::=" in text else "lark", text)
    except ValueError as error:
        raise FieldError(structured.param, f"{structured.param}: {error}") from error


def _schema_text(schema: object, strict: bool) -> str:
    """Return the text of a JSON Schema, given as values or as text, with the style of JSON."""
    if isinstance(schema, str):
        try:
            schema = json.loads(_check_bounds("json", schema))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is not valid JSON: {error}") from error
    if compute_nesting_depth(schema) > MAX_DEPTH:
        raise ValueError(f"the schema is nested deeper than {MAX_DEPTH} levels")
    if not isinstance(schema, dict):
        raise ValueError("the schema must be an object")
    _check_bounds("json", json.dumps(schema, ensure_ascii=False))
    check_schema(schema)
    rewritten = {**rewrite_schema(schema, strict), "x-guidance": JSON_STYLE}
    return _check_bounds("json", json.dumps(rewritten, ensure_ascii=False))


def _choice_grammar(choices: tuple[str, ...]) -> str:
    """Return a grammar of exactly these strings."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"choice has {len(choices)} strings, not 1..{MAX_CHOICES}")
    alternatives = dict.fromkeys(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return "start: " + _check_bounds("choice", " | ".join(alternatives))


def _check_bounds(kind: str, text: str) -> str:
    """Return a text after checking its size. Raises ValueError."""
    size = len(text.encode())
    if not 1 <= size <= MAX_BYTES[kind]:
        raise ValueError(f"{kind} has {size} bytes, not 1..{MAX_BYTES[kind]}")
    if "\0" in text:
        raise ValueError(f"{kind} has a zero byte")
    return text
