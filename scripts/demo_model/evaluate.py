"""Measures the saved demo model: its answers to the held-out questions and its stories.

    python -m scripts.demo_model.evaluate [folder]

Owns generation by transformers and the report; what each rate means is in `metrics`. The corpus
is made again from its seed to see whether a story was copied from it. It knows nothing of how the
model was trained.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM
from transformers import PreTrainedTokenizerBase as HuggingFaceTokenizer

from scripts.demo_model import grammar, metrics
from scripts.demo_model.chat import Message, render_prompt
from scripts.demo_model.metrics import CopyIndex
from scripts.demo_model.tokenization import encode_all
from scripts.demo_model.world import Hero

DEMO_FOLDER = Path(__file__).parents[2] / "gllm" / "demo"
STORY_COUNT = 100
SAMPLING_SEED = 4
_BATCH = 50
_ANSWER_TOKENS = 40
_STORY_TOKENS = 300


@dataclass(frozen=True)
class StoryReport:
    """The rates of one set of stories; those named "free" should be 1."""

    known_words: float
    free_of_repeats: float
    free_of_copies: float
    about_the_hero: float
    about_a_held_out_hero: float
    ended: float


@dataclass(frozen=True)
class Report:
    """Everything that is measured about the demo model."""

    answers: float
    answers_by_kind: dict[str, float]
    greedy: StoryReport
    sampled: StoryReport


class Generator:
    """Answers chat messages with the saved model, its stored weights widened to float32."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: HuggingFaceTokenizer = AutoTokenizer.from_pretrained(
            folder, padding_side="left"
        )
        self._model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answer(self, messages: Sequence[str], limit: int, *, sample: bool) -> list[list[int]]:
        """Return the token ids of the answers, up to and with the one that ends the turn."""
        prompts = [render_prompt([Message("user", message)]) for message in messages]
        eos_ids = self._model.generation_config.eos_token_id
        torch.manual_seed(SAMPLING_SEED)
        answers: list[list[int]] = []
        for start in range(0, len(prompts), _BATCH):
            batch = self.tokenizer(
                prompts[start : start + _BATCH], return_tensors="pt", padding=True
            )
            with torch.inference_mode():
                output = self._model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=limit,
                    do_sample=sample,
                )
            rows = output[:, batch["input_ids"].shape[1] :].tolist()
            answers += (_up_to_end(row, eos_ids) for row in rows)
        return answers

    def text(self, tokens: list[int]) -> str:
        """Tokens as text, without the special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _up_to_end(tokens: list[int], eos_ids: Sequence[int]) -> list[int]:
    ends = [position for position, token in enumerate(tokens) if token in eos_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def judge_questions(generator: Generator) -> tuple[float, dict[str, float]]:
    """Return the rate of exactly right answers, and the same for each kind of question."""
    questions = grammar.held_out_questions()
    tokens = generator.answer([q.question for q in questions], _ANSWER_TOKENS, sample=False)
    given = [generator.text(answer) for answer in tokens]
    by_kind: dict[str, float] = {}
    for kind in dict.fromkeys(question.kind for question in questions):
        pairs = [(g, q.answer) for g, q in zip(given, questions, strict=True) if q.kind == kind]
        by_kind[kind] = metrics.exact_answer_rate(*zip(*pairs, strict=True))
    return metrics.exact_answer_rate(given, [q.answer for q in questions]), by_kind


def judge_stories(generator: Generator, copies: CopyIndex, *, sample: bool) -> StoryReport:
    """Return the rates of the stories about known and held-out heroes."""
    heroes = grammar.story_heroes(STORY_COUNT)
    requests = [f"Tell me a story about {hero.full_name}." for hero in heroes]
    tokens = generator.answer(requests, _STORY_TOKENS, sample=sample)
    stories = [generator.text(story) for story in tokens]
    half = len(heroes) // 2

    def about(told: list[str], asked: list[Hero]) -> float:
        pairs = zip(told, asked, strict=True)
        return metrics.share(
            metrics.tells_about(story, hero.name, hero.animal.noun) for story, hero in pairs
        )

    return StoryReport(
        known_words=metrics.known_word_rate(stories, grammar.vocabulary()),
        free_of_repeats=metrics.share(not metrics.repeats_itself(story) for story in stories),
        free_of_copies=metrics.share(
            not copies.has_copied_run(np.array(story, dtype=np.int64)) for story in tokens
        ),
        about_the_hero=about(stories[:half], heroes[:half]),
        about_a_held_out_hero=about(stories[half:], heroes[half:]),
        ended=metrics.share(len(story) < _STORY_TOKENS for story in tokens),
    )


def evaluate(folder: Path) -> Report:
    """Measure the model in the folder."""
    generator = Generator(folder)
    backend = generator.tokenizer.backend_tokenizer
    corpus = chain(grammar.lessons(), grammar.conversations())
    copies = CopyIndex(encode_all(backend, corpus))
    answers, by_kind = judge_questions(generator)
    return Report(
        answers=answers,
        answers_by_kind=by_kind,
        greedy=judge_stories(generator, copies, sample=False),
        sampled=judge_stories(generator, copies, sample=True),
    )


def describe(report: Report) -> str:
    """Return the report as the rows of a Markdown table."""
    rows = [(f"held-out questions answered exactly ({grammar.QUESTION_COUNT})", report.answers)]
    rows += [(f"... of kind `{kind}`", rate) for kind, rate in report.answers_by_kind.items()]
    for name, stories in (("greedy", report.greedy), ("sampled", report.sampled)):
        rows += [
            (f"{name} stories: words in the vocabulary", stories.known_words),
            (f"{name} stories: no run of 8 words twice", stories.free_of_repeats),
            (f"{name} stories: no 50 tokens copied from the corpus", stories.free_of_copies),
            (f"{name} stories: about the hero, known", stories.about_the_hero),
            (f"{name} stories: about the hero, held out", stories.about_a_held_out_hero),
            (f"{name} stories: came to an end", stories.ended),
        ]
    lines = (f"| {name} | {100 * rate:.1f} % |" for name, rate in rows)
    return "\n".join(("| measure | rate |", "|---|---|", *lines))


def main() -> None:
    """Print the rates of a saved model."""
    parser = argparse.ArgumentParser(description="Measure the demo model.")
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO_FOLDER)
    options = parser.parse_args()
    print(describe(evaluate(options.folder)))


if __name__ == "__main__":
    main()
