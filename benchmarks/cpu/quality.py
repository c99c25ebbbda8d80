"""What number formats cost in quality: perplexity and greedy answers of the demo model.

Texts are held out: questions, and stories about heroes that no training text has. Each is scored
and told by one engine for each format. Run as `python -m benchmarks.cpu.quality`; it prints the
page and writes it to docs/benchmarks/quality.md.
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
from gllm.sim.report import format_table
from scripts.demo_model import grammar
from scripts.demo_model.chat import TURN_END, Message, render_prompt
from scripts.demo_model.stories import draw_scene, tell

DEMO = Path(__file__).parents[2] / "gllm" / "demo"
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8, float32": {"dtype": "float32", "quantization": "int8"},
    "int8, bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
}
"""The first is the one that others are held against."""
STORIES = 100
STORY_SEED = 5
ANSWER_TOKENS, STORY_TOKENS = 40, 300


@dataclass(frozen=True)
class Text:
    """A prompt, and what the grammar has behind it."""

    prompt: list[int]
    rest: list[int]


@dataclass(frozen=True)
class Outcome:
    """What a format makes of texts of one kind."""

    scores: list[list[TokenLogprobs]]
    """Of each rest's tokens."""
    told: list[list[int]]
    """Greedily, after each prompt."""

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability of a token."""
        return math.exp(-fmean(entry.logprob for text in self.scores for entry in text))


def held_out(encode: Tokenizer) -> dict[str, tuple[list[Text], int]]:
    """Texts by kind, and how many tokens an answer may have."""
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


def measure(llm: LLM, texts: list[Text], limit: int) -> Outcome:
    """Score the texts, and have their prompts answered."""
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    scored = llm.generate([text.prompt + text.rest for text in texts], scoring)
    greedy = SamplingParams(temperature=0.0, max_tokens=limit)
    told = llm.generate([text.prompt for text in texts], greedy)
    # The first token of a prompt has no score.
    pairs = zip(scored, texts, strict=True)
    scores = [output.prompt_logprobs[len(text.prompt) - 1 :] for output, text in pairs]
    return Outcome(scores, [output.outputs[0].token_ids for output in told])


def agreement(outcome: Outcome, base: Outcome) -> float:
    """Share of places in the texts where both hold the same token for the likeliest."""
    pairs = [
        (ours.top_ids[0], theirs.top_ids[0])
        for texts in zip(outcome.scores, base.scores, strict=True)
        for ours, theirs in zip(*texts, strict=True)
    ]
    return fmean(one == other for one, other in pairs)


def lines(kind: str, outcomes: dict[str, Outcome], texts: list[Text]) -> list[list[str]]:
    """A row of the table for each format."""
    base = next(iter(outcomes.values()))
    rows = []
    for name, outcome in outcomes.items():
        same = fmean(a == b for a, b in zip(outcome.told, base.told, strict=True))
        right = fmean(told == t.rest for told, t in zip(outcome.told, texts, strict=True))
        rows.append(
            [
                *(kind, name, f"{outcome.perplexity:.4f}"),
                f"{100 * (outcome.perplexity / base.perplexity - 1):+.2f} %",
                f"{agreement(outcome, base):.2%}",
                f"{same:.1%}",
                f"{right:.1%}" if kind == "questions" else "-",
            ]
        )
    return rows


def page(rows: list[list[str]], counts: dict[str, int]) -> str:
    """The table, and what was measured how."""
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    names = [
        *("texts", "numbers", "perplexity", "beside float32", "same likeliest token"),
        *("same greedy answer", "right answers"),
    ]
    return "\n\n".join(
        [
            "# What number formats cost in quality\n\nMade by `python -m benchmarks.cpu.quality`; "
            f"overwritten by it. {processor()}, {versions}, {datetime.date.today()}.",
            "The demo model (2.3 million parameters) on held-out texts: "
            f"{counts['questions']} questions and {counts['stories']} stories about heroes that "
            "no training text has. int8 is `--quantization int8`; the type behind it is that of "
            "everything else, `--dtype`. Perplexity: over the tokens of the answers. Same "
            "likeliest token: at each place of the true text, beside float32. Same greedy answer: "
            f"every token of it, up to {ANSWER_TOKENS} for a question, {STORY_TOKENS} for a story.",
            format_table(names, rows),
        ]
    )


def main() -> None:
    """Print the page and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", default="docs/benchmarks/quality.md")
    options = parser.parse_args()
    kinds = held_out(Tokenizer.from_file(str(DEMO / "tokenizer.json")))
    outcomes: dict[str, dict[str, Outcome]] = {kind: {} for kind in kinds}
    for name, settings in FORMATS.items():
        with LLM("demo", progress=False, **settings) as llm:
            for kind, (texts, limit) in kinds.items():
                outcomes[kind][name] = measure(llm, texts, limit)
    rows = [row for kind, (texts, _) in kinds.items() for row in lines(kind, outcomes[kind], texts)]
    text = page(rows, {kind: len(texts) for kind, (texts, _) in kinds.items()}) + "\n"
    Path(options.output).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
