"""Measure the predictors of output lengths on requests of several kinds, with prompts.

The traces that ship with gllm have lengths and no prompts. The prompts here are made up: each kind
of request has a system prompt, an instruction in some wordings, content of random words, and a
distribution of output lengths of its own. Chats of kind `chat` have ShareGPT's lengths, which their
prompts say nothing about. The demo model's tokenizer encodes them. `--workload NAME` measures a
trace instead; its prompts are unknown, so that predictors use its lengths.
Run: python -m benchmarks.lengths
"""

import argparse
import math
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from gllm.commands.profile.lengths import compare_predictors, format_scores
from gllm.models.hub import DEMO
from gllm.routing.lengths.evaluation import LoggedOutput
from gllm.scheduler.output_lengths import LengthQuery
from gllm.sim.workloads.lengths import sample_lengths
from gllm.text.tokenizer import Tokenizer

MAX_OUTPUT_TOKENS = 2048
NUM_WORDS = 4000
"""Different words of the random content."""


class RequestKind(NamedTuple):
    """Requests of one application."""

    share: float
    """Share of the requests."""
    system: str
    wordings: tuple[str, ...]
    """Instructions; content follows each."""
    content_words: tuple[int, int]
    """Fewest and most words of the content."""
    median_tokens: float
    """Median of the output lengths; 0 for ShareGPT's lengths."""
    sigma: float = 0.4
    """Standard deviation of the logarithm of the output lengths."""
    max_tokens: int = MAX_OUTPUT_TOKENS


KINDS = {
    "classify": RequestKind(
        0.2, "You are a filter of support tickets. Answer with one word.",
        ("Is this ticket urgent? Answer yes or no:", "Which team should get this ticket?"),
        (20, 200), 4, 0.3,
    ),
    "extract": RequestKind(
        0.15, "You extract fields from documents as JSON.",
        ("List the names and dates in this text as JSON:", "Return the invoice's fields as JSON:"),
        (100, 700), 60, 0.35,
    ),
    "summary": RequestKind(
        0.2, "You are a helpful assistant.",
        ("Summarize this text in one paragraph:", "Give me a short summary of the following:"),
        (200, 900), 110, 0.3,
    ),
    "essay": RequestKind(
        0.15, "You are a helpful assistant.",
        ("Write a long and detailed essay about this:", "Explain step by step and in detail:"),
        (5, 40), 800, 0.4,
    ),
    "code": RequestKind(
        0.1, "You are a programmer. Answer with code only.",
        ("Write a Python function that does this:", "Complete the following program:"),
        (20, 250), 220, 0.6,
    ),
    "chat": RequestKind(0.2, "You are a helpful assistant.", ("",), (5, 150), 0),
}  # fmt: skip


def sample_outputs(count: int, seed: int) -> list[LoggedOutput]:
    """Return requests of all kinds in random order, with prompts and output lengths.

    Args:
        count: number of requests.
        seed: seed of kinds, contents and lengths.
    """
    rng, tokenizer = Random(seed), Tokenizer.load(DEMO)
    words = ["".join(rng.choices("abcdefghiklmnoprstuvw", k=rng.randint(2, 9)))
             for _ in range(NUM_WORDS)]  # fmt: skip
    chats = iter(sample_lengths("sharegpt", count, seed))
    outputs = []
    for kind in rng.choices([*KINDS.values()], [kind.share for kind in KINDS.values()], k=count):
        content = " ".join(rng.choices(words, k=rng.randint(*kind.content_words)))
        text = f"{kind.system}\n\nUser: {rng.choice(kind.wordings)} {content}\n\nAssistant:"
        prompt = tokenizer.encode(text, True)
        median = kind.median_tokens
        length = rng.lognormvariate(math.log(median), kind.sigma) if median else next(chats)[1]
        length = max(1, min(round(length), kind.max_tokens))
        outputs.append(LoggedOutput(LengthQuery(len(prompt), kind.max_tokens, prompt), length))
    return outputs


def trace_outputs(workload: str, count: int, seed: int) -> list[LoggedOutput]:
    """Return requests with the lengths of a workload, and unknown prompts."""
    pairs = sample_lengths(workload, count, seed)
    return [LoggedOutput(LengthQuery(prompt), max(1, output)) for prompt, output in pairs]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the accuracy of each predictor."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", help="a workload of gllm simulate; default: made-up prompts")
    values = parser.parse_args(argv)
    count, seed = values.requests, values.seed
    if values.workload:
        outputs = trace_outputs(values.workload, count, seed)
    else:
        outputs = sample_outputs(count, seed)
    print(format_scores(compare_predictors(outputs, count * 4 // 5, "")))


if __name__ == "__main__":
    main()
