"""A model's tokens as the grammar library wants them, and how much one grammar may use up.

Owns the loading of both, the same wherever grammars are compiled: what compiles before a request is
taken compiles on the last stage. Knows nothing of requests.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLParserLimits, LLTokenizer

from gllm.grammar.guide import valid_eos_ids

STEP_FUEL = 50_000
"""Work on regular expressions for one mask, which takes 0.1 s and 50 MB at worst."""
COMPILE_FUEL = 200_000
LEXER_STATES = 20_000
"""States of a grammar's lexer, 1 to 2 KB each."""


def parser_limits() -> LLParserLimits:
    """What one grammar may use up."""
    return LLParserLimits(
        step_lexer_fuel=STEP_FUEL,
        initial_lexer_fuel=COMPILE_FUEL,
        max_lexer_states=LEXER_STATES,
        verbose_errors=False,
    )


def load_grammar_tokenizer(folder: Path, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """The tokens of the model folder's tokenizer.json, padded to the model's vocabulary.

    Raises ValueError where grammars cannot be followed with them.
    """
    ends = valid_eos_ids(eos_ids, vocab_size)
    if not ends:
        raise ValueError("the model has no token that ends a sequence")
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    # A folder may carry the truncation and padding of its training run.
    described["truncation"] = described["padding"] = None
    text = json.dumps(described, ensure_ascii=False)
    try:
        made = LLTokenizer(text, eos_token=ends)
        if made.vocab_size < vocab_size:
            made = LLTokenizer(text, n_vocab=vocab_size, eos_token=ends)
    except Exception as error:
        raise ValueError(f"this model's tokenizer is of a kind without grammars: {error}") from None
    return made
