"""Measure the quality of number formats: perplexity and greedy answers of the demo model.

Texts are held out: questions, and stories about heroes that no training text has. One engine per
format scores the texts and answers the prompts. Run as `python -m benchmarks.cpu.quality`; it
prints the page and writes it to docs/benchmarks/quality.md.
"""

import argparse
import datetime
import math
import platform
import random
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from tokenizers import Tokenizer

from benchmarks.policies import processor
from gllm import LLM, SamplingParams
from gllm.messages.sampling import TokenLogprobs
from gllm.sim.metrics.report import format_table
from scripts.demo_model import grammar
from scripts.demo_model.chat import TURN_END, Message, render_prompt
from scripts.demo_model.stories import draw_scene, tell

DEMO = Path(__file__).parents[2] / "gllm" / "demo"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, float32": {"dtype": "float32", "quantization": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
    "int4, float32": {"dtype": "float32", "quantization": "int4"},
}
"""Engine options by format; the first format is the baseline."""
STORIES = 100
STORY_SEED = 5
ANSWER_TOKENS, STORY_TOKENS = 40, 300


@dataclass(frozen=True)
class Text:
    """A prompt and its true continuation by the grammar."""

    prompt: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class FormatResult:
    """Scores and greedy answers of one format on texts of one kind."""

    scores: list[list[TokenLogprobs]]
    """Log-probabilities of the tokens of each continuation."""
    answers: list[list[int]]
    """Greedy answer to each prompt, as token ids."""

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability per token."""
        return math.exp(-fmean(entry.logprob for text in self.scores for entry in text))


def held_out(encode: Tokenizer) -> dict[str, tuple[list[Text], int]]:
    """Return the texts by kind, each with the maximum tokens of an answer."""
    rng = random.Random(STORY_SEED)
    heroes = grammar.story_heroes(2 * STORIES)[STORIES:]
    pairs = {
        "questions": [(q.question, q.answer) for q in grammar.held_out_questions()],
        "stories": [
            (f"Tell me a story about {hero.full_name}.", tell(draw_scene(rng, hero), rng))
            for hero in heroes
        ],
    }
    limits = {"questions": ANSWER_TOKENS, "stories": STORY_TOKENS}
    return {kind: ([_text(encode, *pair) for pair in pairs[kind]], limits[kind]) for kind in pairs}


def _text(encode: Tokenizer, message: str, answer: str) -> Text:
    prompt = render_prompt([Message("user", message)])
    return Text(encode.encode(prompt).ids, encode.encode(answer + TURN_END).ids)


def measure(llm: LLM, texts: list[Text], limit: int) -> FormatResult:
    """Score the texts and generate greedy answers to their prompts."""
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    scored = llm.generate([text.prompt + text.continuation for text in texts], scoring)
    greedy = SamplingParams(temperature=0.0, max_tokens=limit)
    answered = llm.generate([text.prompt for text in texts], greedy)
    # The first token of a prompt has no score.
    pairs = zip(scored, texts, strict=True)
    scores = [output.prompt_logprobs[len(text.prompt) - 1 :] for output, text in pairs]
    return FormatResult(scores, [output.outputs[0].token_ids for output in answered])


def agreement(outcome: FormatResult, base: FormatResult) -> float:
    """Return the share of positions at which both formats have the same most likely token."""
    pairs = [
        (ours.top_ids[0], theirs.top_ids[0])
        for texts in zip(outcome.scores, base.scores, strict=True)
        for ours, theirs in zip(*texts, strict=True)
    ]
    return fmean(ours == theirs for ours, theirs in pairs)


def format_rows(kind: str, outcomes: dict[str, FormatResult], texts: list[Text]) -> list[list[str]]:
    """Return one table row per format."""
    base = next(iter(outcomes.values()))
    rows = []
    for name, outcome in outcomes.items():
        same = fmean(a == b for a, b in zip(outcome.answers, base.answers, strict=True))
        right = fmean(
            answer == t.continuation for answer, t in zip(outcome.answers, texts, strict=True)
        )
        rows.append(
            [
                kind,
                name,
                f"{outcome.perplexity:.4f}",
                f"{100 * (outcome.perplexity / base.perplexity - 1):+.2f} %",
                f"{agreement(outcome, base):.2%}",
                f"{same:.1%}",
                f"{right:.1%}" if kind == "questions" else "-",
            ]
        )
    return rows


def format_page(rows: list[list[str]], counts: dict[str, int]) -> str:
    """Format the table and the description of the measurement."""
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    names = [
        "texts",
        "numbers",
        "perplexity",
        "beside float32",
        "same likeliest token",
        "same greedy answer",
        "right answers",
    ]
    return "\n\n".join(
        [
            "# What number formats cost in quality\n\nMade by `python -m benchmarks.cpu.quality`; "
            f"overwritten by it. {processor()}, {versions}, {datetime.date.today()}.",
            "The demo model (2.3 million parameters) on held-out texts: "
            f"{counts['questions']} questions and {counts['stories']} stories about heroes that "
            "no training text has. int8 and int4 are those of `--quantization`; the type behind "
            "them is that of "
            "everything else, `--dtype`. Perplexity: over the tokens of the answers. Same "
            "likeliest token: at each place of the true text, beside float32. Same greedy answer: "
            f"every token of it, up to {ANSWER_TOKENS} for a question, {STORY_TOKENS} for a story.",
            format_table(names, rows),
        ]
    )


def main() -> None:
    """Measure, print the page and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", default="docs/benchmarks/quality.md")
    options = parser.parse_args()
    kinds = held_out(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    outcomes: dict[str, dict[str, FormatResult]] = {kind: {} for kind in kinds}
    for name, settings in FORMATS.items():
        with LLM("demo", progress=False, **settings) as llm:
            for kind, (texts, limit) in kinds.items():
                outcomes[kind][name] = measure(llm, texts, limit)
    rows = [
        row
        for kind, (texts, _) in kinds.items()
        for row in format_rows(kind, outcomes[kind], texts)
    ]
    text = format_page(rows, {kind: len(texts) for kind, (texts, _) in kinds.items()}) + "\n"
    Path(options.output).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
