"""The demo model's corpus and its held-out questions, all derived from fixed seeds.

Owns the mix of stories, questions and small talk, and the vocabulary they are made of. Training
and evaluation both call `corpus`, which yields the very same texts each time; no text is stored.
It knows nothing of tokens or of the model.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from scripts.demo_model import lexicon, questions, smalltalk, stories, story_templates
from scripts.demo_model.chat import END_OF_TEXT, Message, render
from scripts.demo_model.questions import Question
from scripts.demo_model.templates import template_words, words
from scripts.demo_model.world import Hero, Split, draw_hero

CORPUS_SEED = 1
QUESTION_SEED = 2
HERO_SEED = 3
QUESTION_COUNT = 300
CORPUS_DOCUMENTS = 60_000
QUESTIONS_FILE = Path(__file__).parents[2] / "tests" / "data" / "demo_questions.jsonl"

STORY_SHARE = 0.22
PLAIN_TEXT_SHARE = 0.12
TALK_SHARE = 0.06
PLAIN_FACT_SHARE = 0.06
REPETITION_SHARE = 0.10
SYSTEM_PROMPT_SHARE = 0.06
MOST_QUESTIONS_PER_PASSAGE = 3


def _chat(turns: list[tuple[str, str]], rng: random.Random) -> str:
    messages: list[Message] = []
    if rng.random() < SYSTEM_PROMPT_SHARE:
        messages.append(Message("system", smalltalk.draw_system_prompt(rng)))
    for question, answer in turns:
        messages += (Message("user", question), Message("assistant", answer))
    return render(messages)


def document(rng: random.Random) -> str:
    """One training text: a chat in the model's markup, or now and then a bare story."""
    kind = rng.random()
    if kind < STORY_SHARE:
        scene = stories.draw_scene(rng)
        story = stories.tell(scene, rng)
        if rng.random() < PLAIN_TEXT_SHARE:
            return f"{story}{END_OF_TEXT}"
        return _chat([(stories.request(scene, rng), story)], rng)
    kind -= STORY_SHARE
    if kind < TALK_SHARE:
        return _chat([smalltalk.draw_talk(rng, draw_hero(rng, Split.TRAIN).full_name)], rng)
    kind -= TALK_SHARE
    if kind < PLAIN_FACT_SHARE:
        return _chat([questions.draw_plain_fact(rng)], rng)
    kind -= PLAIN_FACT_SHARE
    if kind < REPETITION_SHARE:
        return _chat([questions.draw_repetition(rng)], rng)
    return _chat(questions.draw_turns(rng, Split.TRAIN, MOST_QUESTIONS_PER_PASSAGE), rng)


def corpus(count: int, seed: int = CORPUS_SEED) -> Iterator[str]:
    """The first ``count`` training texts of a seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield document(rng)


def held_out_questions(count: int = QUESTION_COUNT, seed: int = QUESTION_SEED) -> list[Question]:
    """Different questions from the test side of the split, evenly over their kinds."""
    rng = random.Random(seed)
    kinds = list(questions.PASSAGES)
    drawn: dict[str, Question] = {}
    while len(drawn) < count:
        question = questions.draw_question(rng, Split.TEST, kinds[len(drawn) % len(kinds)])
        drawn.setdefault(question.question, question)
    return list(drawn.values())


def story_heroes(count: int, seed: int = HERO_SEED) -> list[Hero]:
    """Heroes to ask stories about: the first half is known from training, the rest held out."""
    rng = random.Random(seed)
    known = count // 2
    return [draw_hero(rng, Split.TRAIN if index < known else Split.TEST) for index in range(count)]


def vocabulary() -> set[str]:
    """Every word, in lower case, that a text of the grammar may contain."""
    listed = [str(place) for place in lexicon.PLACES]
    for animal in lexicon.ANIMALS:
        listed += (animal.noun, animal.home, animal.sound, animal.food)
    for group in (
        lexicon.GIRLS, lexicon.BOYS, lexicon.THINGS, lexicon.COLOURS, lexicon.COUNTED,
        lexicon.TRAITS, lexicon.WEATHERS, lexicon.HOBBIES, lexicon.TREATS, lexicon.HIDEOUTS,
        lexicon.TRAPS, lexicon.TOOLS, lexicon.MATERIALS, *lexicon.OPPOSITES,
    ):  # fmt: skip
        listed += group
    steps = [story_templates.OPENING, story_templates.HABIT, story_templates.JOY]
    steps += [story_templates.ENDING, *(s for plot in story_templates.PLOTS.values() for s in plot)]
    templates = [template for step in steps for template in step]
    templates += stories.REQUEST_TEMPLATES + smalltalk.TALK_TEMPLATES
    templates += questions.WORDING
    numbers = (str(number) for number in range(2 * lexicon.LARGEST_ADDEND + 1))
    pronouns = ("he", "she", "him", "her", "his", "a", "an", "the", "to", "from")
    return {word for text in (*listed, *numbers, *pronouns) for word in words(text)} | (
        template_words(templates)
    )


def questions_as_jsonl(items: list[Question]) -> str:
    """The questions in the form of the committed file."""
    rows = ({"kind": q.kind, "question": q.question, "answer": q.answer} for q in items)
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Write the file of held-out questions."""
    QUESTIONS_FILE.parent.mkdir(parents=True, exist_ok=True)
    QUESTIONS_FILE.write_text(questions_as_jsonl(held_out_questions()), encoding="utf-8")
    print(f"{QUESTION_COUNT} questions written to {QUESTIONS_FILE}")


if __name__ == "__main__":
    main()
