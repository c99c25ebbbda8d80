"""Tokens that an emulated model generates: functions of the sequence and the position alone.

A text is therefore the same after a recovery, a hand-off or a preemption.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gllm.config.emulation import (
    PASSAGE,
    PROMPT,
    TO_LIMIT,
    TRACE,
    EmulationConfig,
    fixed_output,
)
from gllm.options.field_types import FieldError
from gllm.sim.workloads.lengths import sample_lengths
from gllm.text.tokenizer import Tokenizer

PASSAGE_TEXT = """\
A pipeline of stages is like a row of people who hand on buckets of water. Each one needs a moment
for a bucket, and the row is as fast as its slowest member. If some buckets are full and others
nearly empty, those who carry little wait for those who carry much, and at the fire there is less
water than there could be. So whoever fills the buckets at the well watches how many people wait,
how much room is left at the end, and how long each bucket takes, and fills them alike.
"""
"""Text of outputs by default."""
NUM_LENGTHS = 4096
"""Output lengths that are drawn from a workload."""
HASHED_TOKENS = 256
"""Tokens of a prompt that decide where in the text its output begins, and how long it is."""
CLOSE_EVERY = 8
"""Tokens of a structured output after which a string ends, or all if the grammar allows it: the
text alone would be a string without an end."""
CLOSING, CHOSEN, TEXT = 100.0, 90.0, 80.0
"""Logits of those ends; of the chosen token; and of the text, for a request that forbids the chosen
token because it ends the output. Others have 0: a difference of 10 decides."""
QUOTE = '"'
STRUCTURE = {
    QUOTE: 60.0,
    ":": 60.0,
    "{": 50.0,
    "[": 50.0,
    "}": 40.0,
    "]": 40.0,
    ",": 30.0,
    "1": 20.0,
}
"""Logits where the grammar does not allow the text: JSON with few and short values."""


class EmulatedText(NamedTuple):
    """Output of one sequence, if the request permits it."""

    tokens: Sequence[int]
    """The text, repeated without an end."""
    start: int
    """Index of the first of them in the output."""
    num_tokens: int | None
    """Tokens of the output, with the one that ends it; None up to the limit."""
    eos_id: int | None
    """The token that ends the output."""

    def continuation(self, index: int) -> int:
        """Return the token of the text at a position of the output, from 0."""
        return self.tokens[(self.start + index) % len(self.tokens)]

    def token(self, index: int) -> int:
        """Return the token at a position of the output, from 0."""
        if self.eos_id is not None and self.num_tokens is not None and index + 1 >= self.num_tokens:
            return self.eos_id
        return self.continuation(index)


class EmulatedOutput:
    """Chooses the tokens of outputs and their lengths."""

    def __init__(
        self, config: EmulationConfig, folder: Path, eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        """Tokenize the text and draw the lengths.

        Args:
            config: source of text and lengths.
            folder: model folder, with its tokenizer.
            eos_ids: tokens that end a sequence.
            vocab_size: tokens of the model; its tokenizer may have more.

        Raises:
            FieldError: the text cannot be read, or the workload is unknown.
        """
        self._eos_ids = tuple(token for token in eos_ids if token < vocab_size)
        self._repeats_prompt = config.emulated_text == PROMPT
        tokenizer = Tokenizer.load(folder)
        ids = tokenizer.encode(_read_text(config.emulated_text), add_special_tokens=False)
        special = tokenizer.special_token_ids | set(eos_ids)
        self._text = [token for token in ids if token not in special and token < vocab_size]
        if not self._text:
            raise FieldError(
                "emulated_text",
                f"emulated_text {config.emulated_text} has no tokens: choose a file with text",
            )
        self.special_ids = sorted(token for token in special if token < vocab_size)
        """Special tokens and those that end a sequence, of which the text has none."""
        self._special = special
        self._structure = _by_token(tokenizer, STRUCTURE)
        self._closing = dict.fromkeys(
            [*_by_token(tokenizer, {QUOTE: CLOSING}), *self._eos_ids], CLOSING
        )
        self._lengths = draw_lengths(config.emulated_output)
        if self._lengths and not self._eos_ids:
            raise FieldError(
                "emulated_output",
                f"emulated_output is {config.emulated_output}, but the model has no end-of-sequence"
                f" token: choose {TO_LIMIT}",
            )

    def create_text(self, prompt: Sequence[int], choice: int) -> EmulatedText:
        """Return the output of a sequence.

        Args:
            prompt: tokens of the request.
            choice: index among the choices of the request.
        """
        key = zlib.crc32(repr((choice, prompt[:HASHED_TOKENS])).encode())
        num_tokens, eos_id = None, None
        if self._lengths:
            num_tokens, eos_id = self._lengths[key % len(self._lengths)], self._eos_ids[0]
        if self._repeats_prompt:
            tokens = [token for token in prompt if token not in self._special]
            if tokens:
                return EmulatedText(tokens, 0, num_tokens, eos_id)
        return EmulatedText(self._text, key % len(self._text), num_tokens, eos_id)

    def preferences(self, text: EmulatedText, index: int, has_grammar: bool) -> dict[int, float]:
        """Return logits by which sampling takes a token of a text if the request permits it.

        Args:
            text: text of the sequence.
            index: position of the token in the output, from 0.
            has_grammar: True if the output has a grammar, which allows the text in few places.

        Returns:
            Logits of some tokens; others have 0.
        """
        logits: dict[int, float] = {}
        if has_grammar:
            logits |= self._structure | dict.fromkeys(self._eos_ids, TEXT)
        logits[text.continuation(index)] = TEXT
        logits[text.token(index)] = CHOSEN
        if has_grammar and index % CLOSE_EVERY == CLOSE_EVERY - 1:
            logits |= self._closing
        return logits


def _by_token(tokenizer: Tokenizer, logits: dict[str, float]) -> dict[int, float]:
    """Return logits by token, of texts that are one token."""
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in logits}
    return {ids[text][0]: logit for text, logit in logits.items() if len(ids[text]) == 1}


def check_output(config: EmulationConfig) -> None:
    """Raise FieldError if the text cannot be read, or the workload of the lengths is unknown."""
    _read_text(config.emulated_text)
    draw_lengths(config.emulated_output)


def draw_lengths(value: str) -> list[int]:
    """Return output lengths of a value of --emulated-output, in tokens; none up to the limit.

    Raises:
        FieldError: the workload is unknown.
    """
    if (number := fixed_output(value)) is not None:
        return [number]
    if value == TO_LIMIT:
        return []
    try:
        lengths = sample_lengths(value.removeprefix(TRACE), NUM_LENGTHS, seed=0)
    except ValueError as error:
        raise FieldError("emulated_output", f"emulated_output: {error}") from error
    return [output for _, output in lengths]


def _read_text(value: str) -> str:
    """Return the text of a value of --emulated-text. Raises FieldError if there is none."""
    if value in (PASSAGE, PROMPT):
        return PASSAGE_TEXT
    try:
        text = Path(value).read_text(encoding="utf-8")
        if text.strip():
            return text
        reason = "it has no text"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise FieldError(
        "emulated_text",
        f"emulated_text {value}: {reason}: choose a file of text, {PROMPT} or {PASSAGE}",
    )
