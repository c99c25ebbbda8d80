"""Perplexity by the convention of llama.cpp's llama-perplexity, and greedy answers, of an engine.

A text is divided into windows of WINDOW tokens. If the model wants a BOS token, it replaces the
first token of each window. Every window is a context of its own; the tokens of its second half but
the first one are scored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gllm import LLM, SamplingParams
from gllm.options.limits import MAX_LOGPROBS

WINDOW = 512
"""Tokens of a context."""
FIRST_SCORED = WINDOW // 2 + 1
"""Position in a window of the first token that is scored; the last token of the window is the last
one."""
SCORED = WINDOW - FIRST_SCORED
"""Scored tokens of a window."""
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 20, 32, 24
"""Windows whose first PROMPT_TOKENS tokens are a prompt, and tokens of the greedy answer to it."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
PAGES = (
    "architecture",
    "batch-invariance",
    "cluster-managers",
    "disaggregation",
    "emulation",
    "extend",
    "kv-events",
    "nodes",
    "operations",
    "overview",
    "parallelism",
    "plan-search",
    "planning",
    "platform",
    "recovery",
    "router",
    "sampling",
    "scheduler",
    "security",
    "simulator",
    "simulator-clusters",
    "simulator-costs",
    "simulator-design",
    "structured-output",
    "tools",
)
"""Pages of docs/ whose prose is the text."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the scored tokens and greedy answers to the prompts of one engine."""

    logprobs: Floats
    """[scored] of the true tokens."""
    top_ids: Ints
    """[scored, MAX_LOGPROBS] most likely tokens, the likeliest first."""
    top_logprobs: Floats
    """[scored, MAX_LOGPROBS]."""
    answers: Ints
    """[NUM_PROMPTS, ANSWER_TOKENS] greedy answers, -1 behind their ends."""

    @property
    def num_windows(self) -> int:
        """Windows that were scored."""
        return len(self.logprobs) // SCORED

    def perplexity(self, num_windows: int) -> float:
        """Return the exponential of the mean negative log-probability of the first windows."""
        return math.exp(-float(self.logprobs[: num_windows * SCORED].mean()))

    def save(self, path: Path) -> None:
        """Write the arrays to a file."""
        save_arrays(path, self)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the arrays from a file."""
        with np.load(path) as arrays:
            return cls(**arrays)


def save_arrays(path: Path, scores: Any) -> None:
    """Write the fields of a dataclass to a file, by their names."""
    np.savez_compressed(path, **{each.name: getattr(scores, each.name) for each in fields(scores)})


def read_prose(docs: Path) -> str:
    """Return the paragraphs of gllm's pages, without headings, tables, lists and code."""
    paragraphs = []
    for page in PAGES:
        text = (docs / f"{page}.md").read_text(encoding="utf-8")
        for block in text.split("\n\n"):
            if block[:1].isalpha():
                paragraphs.append(" ".join(block.split()))
    return "\n\n".join(paragraphs)


def split_windows(tokens: Sequence[int], bos: int | None) -> list[list[int]]:
    """Return the complete windows of a text; bos: token that begins each, if the model has one."""
    windows = [
        list(tokens[begin : begin + WINDOW]) for begin in range(0, len(tokens) - WINDOW + 1, WINDOW)
    ]
    if bos is not None:
        for window in windows:
            window[0] = bos
    return windows


def split_prompts(windows: list[list[int]]) -> list[list[int]]:
    """Return the prompts for greedy answers: the beginnings of the first windows."""
    return [window[:PROMPT_TOKENS] for window in windows[:NUM_PROMPTS]]


def score(model: Path, windows: list[list[int]], options: dict[str, Any]) -> Scores:
    """Score windows and answer their beginnings with gllm.

    Args:
        model: folder or file.
        windows: WINDOW tokens each.
        options: of the engine.
    """
    # One thread does not wait for another beside busy neighbors; the bits are the same.
    limits: dict[str, Any] = {"max_model_len": 2 * WINDOW, "device": "cpu", "threads": 1}
    with LLM(str(model), progress=False, **limits, **options) as llm:
        scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
        outputs = llm.generate(windows, scoring)
        greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
        answers = llm.generate(split_prompts(windows), greedy)
    # A prompt's first token has no score.
    entries = [entry for output in outputs for entry in output.prompt_logprobs[FIRST_SCORED - 1 :]]
    return Scores(
        np.array([entry.logprob for entry in entries]),
        np.array([entry.top_ids[:MAX_LOGPROBS] for entry in entries]),
        np.array([entry.top_logprobs[:MAX_LOGPROBS] for entry in entries]),
        pad_answers([output.outputs[0].token_ids for output in answers]),
    )


def pad_answers(answers: Sequence[Sequence[int]]) -> Ints:
    """Return answers as rows of ANSWER_TOKENS tokens."""
    rows = np.full((len(answers), ANSWER_TOKENS), -1)
    for row, answer in zip(rows, answers, strict=True):
        row[: len(answer)] = answer
    return rows


def share_of_same_answers(one: Ints, other: Ints) -> float:
    """Return the share of the answers to the first prompts that are equal as a whole."""
    count = min(len(one), len(other))
    return float((one[:count] == other[:count]).all(1).mean())
