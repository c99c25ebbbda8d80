"""Tokens that an emulated model generates: functions of the sequence and the position alone.

A text is therefore the same after a recovery, a hand-off or a preemption.
"""

import zlib
from collections.abc import Sequence
from pathlib import Path

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


class EmulatedOutput:
    """Chooses the tokens of outputs and their lengths."""

    def __init__(self, config: EmulationConfig, folder: Path, eos_ids: Sequence[int]) -> None:
        """Tokenize the text and draw the lengths.

        Args:
            config: source of text and lengths.
            folder: model folder, with its tokenizer.
            eos_ids: tokens that end a sequence.

        Raises:
            FieldError: the text cannot be read, or the workload is unknown.
        """
        self._eos_ids = tuple(eos_ids)
        self._repeats_prompt = config.emulated_text == PROMPT
        tokenizer = Tokenizer.load(folder)
        ids = tokenizer.encode(_read_text(config.emulated_text), add_special_tokens=False)
        special = tokenizer.special_token_ids | set(eos_ids)
        self._text = [token for token in ids if token not in special]
        if not self._text:
            raise FieldError("emulated_text", f"emulated_text {config.emulated_text} has no tokens")
        self._special = special
        self._lengths = draw_lengths(config.emulated_output)
        if self._lengths and not eos_ids:
            raise FieldError(
                "emulated_output",
                f"emulated_output is {config.emulated_output}, but the model has no end-of-sequence"
                f" token: choose {TO_LIMIT}",
            )

    def choose(self, prompt: Sequence[int], choice: int, index: int) -> int:
        """Return an output token.

        Args:
            prompt: tokens of the request.
            choice: index among the choices of the request.
            index: position of the token in the output, from 0.
        """
        key = zlib.crc32(repr((choice, prompt[:HASHED_TOKENS])).encode())
        if self._lengths and index + 1 >= self._lengths[key % len(self._lengths)]:
            return self._eos_ids[0]
        text: Sequence[int] = self._text
        if self._repeats_prompt:
            text = [token for token in prompt if token not in self._special] or text
            return text[index % len(text)]
        return text[(key + index) % len(text)]


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
    """Return the text of a value of --emulated-text. Raises FieldError if it cannot be read."""
    if value in (PASSAGE, PROMPT):
        return PASSAGE_TEXT
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FieldError("emulated_text", f"emulated_text {value}: {error}") from error
