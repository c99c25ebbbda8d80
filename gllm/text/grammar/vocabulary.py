"""Load a model's tokenizer for the grammar library, and set the limits of one grammar.

The compiler process and the last stage use the same vocabulary and limits: a grammar that compiles
when its request arrives also compiles on the last stage.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

from gllm.text.added_tokens import read_description
from gllm.text.conversion.folder import prepare_tokenizer_folder
from gllm.text.grammar.guide import filter_eos_ids

STEP_FUEL = 50_000
"""Limit of work on regular expressions per mask, which is at most 0.1 s and 50 MB."""
COMPILE_FUEL = 200_000
"""Limit of work on regular expressions while a grammar is compiled."""
LEXER_STATES = 20_000
"""Limit of the states of a grammar's lexer, 1 to 2 KB each."""


def create_parser_limits() -> LLParserLimits:
    """Return the limits of llguidance's parser for one grammar."""
    return LLParserLimits(
        step_lexer_fuel=STEP_FUEL,
        initial_lexer_fuel=COMPILE_FUEL,
        max_lexer_states=LEXER_STATES,
        verbose_errors=False,
    )


def load_grammar_tokenizer(folder: Path, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Load the tokenizer of a model folder as llguidance needs it to compute token masks.

    Raises:
        ValueError: The model has no token that ends a sequence, or its tokenizer is not supported
            by llguidance.
    """
    eos_tokens = filter_eos_ids(eos_ids, vocab_size)
    if not eos_tokens:
        raise ValueError("the model has no token that ends a sequence")
    description = read_description(prepare_tokenizer_folder(folder))
    # The file may contain truncation and padding of the training run.
    description["truncation"] = description["padding"] = None
    text = json.dumps(description, ensure_ascii=False)
    try:
        # The slices, which make masks faster, are those of the tokenizer that is returned.
        tokenizer = LLTokenizer(text, eos_token=eos_tokens, slices=[])
        if tokenizer.vocab_size < vocab_size:
            tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_tokens, slices=[])
        plain = TokenizerWrapper(_PlainTextTokenizer(tokenizer, eos_tokens[0]))
        return LLTokenizer(plain, n_vocab=tokenizer.vocab_size, eos_token=eos_tokens)
    except Exception as error:
        raise ValueError(f"this model's tokenizer does not support grammars: {error}") from None


class _PlainTextTokenizer:
    """Tokenizer of forced texts, in which spelled special tokens are ordinary text.

    The library's own tokenizer makes control tokens of them, which do not match the grammar.

    Args:
        tokenizer: The library's tokenizer.
        eos_id: Token that ends a sequence.
    """

    def __init__(self, tokenizer: LLTokenizer, eos_id: int) -> None:
        ids = range(tokenizer.vocab_size)
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_id, None
        self.tokens = [tokenizer.decode_bytes([token]) for token in ids]
        """Bytes of every token."""
        self.special_token_ids = [token for token in ids if tokenizer.is_special_token(token)]
        self._special_ids = frozenset(self.special_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        """Return the ids of a text in UTF-8."""
        ids = self._tokenizer.tokenize_bytes(text)
        if self._special_ids.isdisjoint(ids):
            return ids
        return self._tokenizer.greedy_tokenize(text.decode())
