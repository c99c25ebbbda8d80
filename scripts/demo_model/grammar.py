"""The demo model's corpus and its held-out questions, all derived from fixed seeds.

Owns the mix of stories, questions and small talk, and the vocabulary they are made of. The corpus
has two parts, short `lessons` and full `conversations`; both yield the very same texts each time
they are called, so training and evaluation see one corpus although no text is stored. It knows
nothing of tokens or of the model.
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

LESSON_SEED = 0
CONVERSATION_SEED = 1
QUESTION_SEED = 2
HERO_SEED = 3
LESSON_COUNT = 86_000
CONVERSATION_COUNT = 46_000
QUESTION_COUNT = 300
QUESTIONS_FILE = Path(__file__).parents[2] / "tests" / "data" / "demo_questions.jsonl"

CONVERSATION_WEIGHTS = {
    "story": 26,
    "bare story": 4,
    "talk": 6,
    "plain fact": 6,
    "repetition": 6,
    "questions": 52,
}
LESSON_REPETITION_SHARE = 0.2
SYSTEM_PROMPT_SHARE = 0.06
MOST_QUESTIONS_PER_PASSAGE = 3


def _chat(turns: list[tuple[str, str]], rng: random.Random) -> str:
    messages: list[Message] = []
    if rng.random() < SYSTEM_PROMPT_SHARE:
        messages.append(Message("system", smalltalk.draw_system_prompt(rng)))
    for question, answer in turns:
        messages += (Message("user", question), Message("assistant", answer))
    return render(messages)


def lesson(rng: random.Random) -> str:
    """Return a chat of one short question: early practice at looking things up in the message."""
    if rng.random() < LESSON_REPETITION_SHARE:
        return _chat([questions.draw_repetition(rng)], rng)
    return _chat(questions.draw_turns(rng, Split.TRAIN, 1), rng)


def conversation(rng: random.Random) -> str:
    """One text of the full mix: a chat in the model's markup, or now and then a bare story."""
    (kind,) = rng.choices(list(CONVERSATION_WEIGHTS), list(CONVERSATION_WEIGHTS.values()))
    if kind == "story":
        scene = stories.draw_scene(rng)
        return _chat([(stories.request(scene, rng), stories.tell(scene, rng))], rng)
    if kind == "bare story":
        return f"{stories.tell(stories.draw_scene(rng), rng)}{END_OF_TEXT}"
    if kind == "talk":
        return _chat([smalltalk.draw_talk(rng, draw_hero(rng, Split.TRAIN).full_name)], rng)
    if kind == "plain fact":
        return _chat([questions.draw_plain_fact(rng)], rng)
    if kind == "repetition":
        return _chat([questions.draw_repetition(rng)], rng)
    return _chat(questions.draw_turns(rng, Split.TRAIN, MOST_QUESTIONS_PER_PASSAGE), rng)


def lessons(count: int = LESSON_COUNT, seed: int = LESSON_SEED) -> Iterator[str]:
    """Return the first ``count`` texts of the first part of the corpus."""
    rng = random.Random(seed)
    return (lesson(rng) for _ in range(count))


def conversations(count: int = CONVERSATION_COUNT, seed: int = CONVERSATION_SEED) -> Iterator[str]:
    """Return the first ``count`` texts of the second part of the corpus."""
    rng = random.Random(seed)
    return (conversation(rng) for _ in range(count))


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
    """Return the questions in the form of the committed file."""
    rows = ({"kind": q.kind, "question": q.question, "answer": q.answer} for q in items)
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Write the file of held-out questions."""
    QUESTIONS_FILE.parent.mkdir(parents=True, exist_ok=True)
    QUESTIONS_FILE.write_text(questions_as_jsonl(held_out_questions()), encoding="utf-8")
    print(f"{QUESTION_COUNT} questions written to {QUESTIONS_FILE}")


if __name__ == "__main__":
    main()
