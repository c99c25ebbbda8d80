"""From what a request asks its output to be to one text that can be compiled.

Owns the bounds on size and the checks that need no compiler. Knows nothing of tokens.
"""

import json
from typing import NamedTuple

from gllm.config.field_types import FieldError
from gllm.config.sampling import StructuredOutput
from gllm.grammar.sources.json_schema import MAX_DEPTH, check_schema, nesting_depth
from gllm.grammar.sources.rewrite import rewrite_schema

MAX_BYTES = {"json": 2**17, "regex": 2**13, "choice": 2**16, "grammar": 2**16}
"""Largest text of each kind."""
MAX_CHOICES = 4096
STYLE = {"whitespace_flexible": False}
"""How JSON is written: without white space, so that much of it follows from the schema, and a model
cannot go on with blanks for ever."""


class GrammarSource(NamedTuple):
    """A grammar to be compiled."""

    format: str
    """json_schema, regex, lark or gbnf."""
    text: str


def to_grammar_source(wanted: StructuredOutput) -> GrammarSource:
    """The grammar of a structured output. Raises FieldError."""
    try:
        if wanted.json is not None:
            return GrammarSource("json_schema", _schema(wanted.json, wanted.strict))
        if wanted.regex is not None:
            return GrammarSource("regex", _bounded("regex", wanted.regex))
        if wanted.choice is not None:
            return GrammarSource("lark", _choice(wanted.choice))
        assert wanted.grammar is not None, "a structured output has one of four"
        text = _bounded("grammar", wanted.grammar)
        return GrammarSource("gbnf" if "::=" in text else "lark", text)
    except ValueError as error:
        raise FieldError(wanted.param, f"{wanted.param}: {error}") from error


def _schema(schema: object, strict: bool) -> str:
    """A JSON Schema, given as values or as text, with how JSON is to be written."""
    if isinstance(schema, str):
        try:
            schema = json.loads(_bounded("json", schema))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the schema is no JSON: {error}") from error
    if nesting_depth(schema) > MAX_DEPTH:
        raise ValueError(f"the schema is nested deeper than {MAX_DEPTH} levels")
    if not isinstance(schema, dict):
        raise ValueError("the schema has to be an object")
    check_schema(schema)
    made = {**rewrite_schema(schema, strict), "x-guidance": STYLE}
    return _bounded("json", json.dumps(made, ensure_ascii=False))


def _choice(choices: tuple[str, ...]) -> str:
    """A grammar of nothing but these strings."""
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"choice has {len(choices)} strings, not 1..{MAX_CHOICES}")
    alternatives = dict.fromkeys(json.dumps(one, ensure_ascii=False) for one in choices)
    return "start: " + _bounded("choice", " | ".join(alternatives))


def _bounded(kind: str, text: str) -> str:
    size = len(text.encode())
    if not 1 <= size <= MAX_BYTES[kind]:
        raise ValueError(f"{kind} has {size} bytes, not 1..{MAX_BYTES[kind]}")
    if "\0" in text:
        raise ValueError(f"{kind} has a zero byte")
    return text
