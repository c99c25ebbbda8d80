"""Simple questions with one right answer: reading, counting, opposites and animal facts.

Owns their wording and the statements each question rests on. A question is answered from its own
small context or from a fact about animals; it is drawn from one side of the split, so that no
statement of a test question can appear in training. It knows nothing of chat markup.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from scripts.demo_model import lexicon
from scripts.demo_model.stories import article
from scripts.demo_model.world import Hero, Split, Statement, draw_hero, draw_place, is_held_out

# The fixed words of all questions and answers below; what varies comes from the word lists.
INTRODUCTIONS = ("Read this: ", "Listen: ", "We know this: ", "")
WORDING = (
    *INTRODUCTIONS,
    "has a. Who has the? What colour is the? What does have? Where is? Who is?",
    "gets more. How many does have now? is the opposite. What is like? It is.",
    "is a. is an. What animal is? Where does live? lives. What does say? says.",
    "What does like to eat? likes to eat. What is the opposite of? What is plus?",
    "Say this: Please repeat: You said:",
)

ONE_FACT_SHARE = 2 / 3


@dataclass(frozen=True)
class Question:
    """A user's message, its one right answer, and the statements it is built on."""

    kind: str
    question: str
    answer: str
    statements: tuple[Statement, ...] = ()


@dataclass(frozen=True)
class Passage:
    """A small context and the (question, answer) pairs that can be asked about it."""

    kind: str
    context: str
    pairs: tuple[tuple[str, str], ...]
    statements: tuple[Statement, ...]


def _draw_heroes(rng: random.Random, split: Split) -> tuple[Hero, Hero]:
    """Two different heroes. Test questions mix known with held-out heroes, training never does."""
    sides = [split, split] if split is Split.TRAIN else rng.choices(list(Split), k=2)
    first = draw_hero(rng, sides[0])
    return first, draw_hero(rng, sides[1], unlike=first)


def _shown(rng: random.Random, heroes: tuple[Hero, Hero]) -> tuple[Hero, ...]:
    """Return the heroes of a context: usually one, sometimes several to choose from."""
    return heroes[:1] if rng.random() < ONE_FACT_SHARE else heroes


def _owning(rng: random.Random, split: Split) -> Passage:
    heroes = _shown(rng, _draw_heroes(rng, split))
    things = rng.sample(lexicon.THINGS, len(heroes))
    colours = rng.sample(lexicon.COLOURS, len(heroes))
    context: list[str] = []
    pairs: list[tuple[str, str]] = []
    for hero, thing, colour in zip(heroes, things, colours, strict=True):
        context.append(f"{hero.full_name} has a {colour} {thing}.")
        pairs.append((f"Who has the {thing}?", f"It is {hero.full_name}."))
        pairs.append((f"What colour is the {thing}?", f"It is {colour}."))
        pairs.append((f"What does {hero.name} have?", f"{hero.pronoun} has a {colour} {thing}."))
    parts = zip(heroes, things, colours, strict=True)
    statements = tuple(Statement(hero, thing, colour) for hero, thing, colour in parts)
    return Passage("owning", " ".join(context), tuple(pairs), statements)


def _being_somewhere(rng: random.Random, split: Split) -> Passage:
    heroes = _shown(rng, _draw_heroes(rng, split))
    first = draw_place(rng)
    places = (first, draw_place(rng, unlike=first))[: len(heroes)]
    context: list[str] = []
    pairs: list[tuple[str, str]] = []
    for hero, place in zip(heroes, places, strict=True):
        context.append(f"{hero.full_name} is {place}.")
        pairs.append((f"Where is {hero.name}?", f"{hero.pronoun} is {place}."))
        pairs.append((f"Who is {place}?", f"It is {hero.full_name}."))
    parts = zip(heroes, places, strict=True)
    statements = tuple(Statement(hero, place=str(place)) for hero, place in parts)
    return Passage("place", " ".join(context), tuple(pairs), statements)


def _counting(rng: random.Random, split: Split) -> Passage:
    hero = _draw_heroes(rng, split)[0]
    things = rng.choice(lexicon.COUNTED)
    first, second = rng.randint(2, lexicon.LARGEST_ADDEND), rng.randint(2, lexicon.LARGEST_ADDEND)
    context = f"{hero.full_name} has {first} {things}. {hero.pronoun} gets {second} more {things}."
    question = f"How many {things} does {hero.name} have now?"
    answer = f"{hero.pronoun} has {first + second} {things}."
    statement = Statement(hero, f"{first} {things} and {second}")
    return Passage("counting", context, ((question, answer),), (statement,))


def _opposite(rng: random.Random, split: Split) -> Passage:
    first, second = _draw_heroes(rng, split)
    quality, opposite = rng.sample(rng.choice(lexicon.OPPOSITES), 2)
    context = f"{first.full_name} is {quality}. {second.full_name} is the opposite."
    pairs = ((f"What is {second.name} like?", f"{second.pronoun} is {opposite}."),)
    statements = (Statement(first, quality), Statement(second, opposite))
    return Passage("opposite", context, pairs, statements)


def _kinds(rng: random.Random, split: Split) -> Passage:
    # The heroes themselves are what is held out here, so both come from the split itself.
    first = draw_hero(rng, split)
    heroes = _shown(rng, (first, draw_hero(rng, split, unlike=first)))
    context = " ".join(f"{hero.name} is {article(hero.animal.noun)}." for hero in heroes)
    pairs: list[tuple[str, str]] = []
    for hero in heroes:
        noun, pronoun = hero.animal.noun, hero.pronoun
        pairs.append((f"What animal is {hero.name}?", f"{pronoun} is {article(noun)}."))
        pairs.append((f"Who is the {noun}?", f"It is {hero.name}."))
        pairs.append((f"Where does {hero.name} live?", f"{pronoun} lives {hero.animal.home}."))
    return Passage("kind", context, tuple(pairs), tuple(Statement(hero) for hero in heroes))


def _fact(rng: random.Random, split: Split) -> Passage:
    hero = draw_hero(rng, split)
    animal, name, pronoun = hero.animal, hero.full_name, hero.pronoun
    pairs = (
        (f"Where does {name} live?", f"{pronoun} lives {animal.home}."),
        (f"What does {name} say?", f"{pronoun} says {animal.sound}."),
        (f"What does {name} like to eat?", f"{pronoun} likes to eat {animal.food}."),
    )
    return Passage("fact", "", pairs, (Statement(hero),))


PASSAGES: dict[str, Callable[[random.Random, Split], Passage]] = {
    "owning": _owning,
    "place": _being_somewhere,
    "counting": _counting,
    "opposite": _opposite,
    "kind": _kinds,
    "fact": _fact,
}


def draw_passage(rng: random.Random, split: Split, kind: str | None = None) -> Passage:
    """Return a passage all of whose statements lie on the given side of the split."""
    make = PASSAGES[kind or rng.choice(list(PASSAGES))]
    while True:
        passage = make(rng, split)
        if all(is_held_out(statement) is (split is Split.TEST) for statement in passage.statements):
            return passage


def _ask(passage: Passage, question: str, rng: random.Random) -> str:
    """Return the passage and a question about it as one message."""
    if not passage.context:
        return question
    return f"{rng.choice(INTRODUCTIONS)}{passage.context} {question}"


def draw_turns(rng: random.Random, split: Split, most: int) -> list[tuple[str, str]]:
    """Return a passage and up to ``most`` different questions as turns of one conversation."""
    passage = draw_passage(rng, split)
    pairs = rng.sample(passage.pairs, min(rng.randint(1, most), len(passage.pairs)))
    first, *more = pairs
    return [(_ask(passage, first[0], rng), first[1]), *more]


def draw_question(rng: random.Random, split: Split, kind: str) -> Question:
    """One question of the given kind, its context included."""
    passage = draw_passage(rng, split, kind)
    question, answer = rng.choice(passage.pairs)
    return Question(kind, _ask(passage, question, rng), answer, passage.statements)


def draw_plain_fact(rng: random.Random) -> tuple[str, str]:
    """Return a question about the world at large; such facts are trained on, never tested."""
    animal = rng.choice(lexicon.ANIMALS)
    first, second = rng.randint(0, lexicon.LARGEST_ADDEND), rng.randint(0, lexicon.LARGEST_ADDEND)
    quality, opposite = rng.sample(rng.choice(lexicon.OPPOSITES), 2)
    one = article(animal.noun)
    pairs = (
        (f"Where does {one} live?", f"It lives {animal.home}."),
        (f"What does {one} say?", f"It says {animal.sound}."),
        (f"What does {one} like to eat?", f"It likes to eat {animal.food}."),
        (f"What is the opposite of {quality}?", f"It is {opposite}."),
        (f"What is {first} plus {second}?", f"It is {first + second}."),
    )
    return rng.choice(pairs)


def draw_repetition(rng: random.Random) -> tuple[str, str]:
    """Words to be said again. It is not tested; it teaches the model early to look back."""
    names = lexicon.GIRLS + lexicon.BOYS
    pool = names + lexicon.THINGS + lexicon.COLOURS + tuple(a.noun for a in lexicon.ANIMALS)
    said = " ".join(rng.sample(pool, rng.randint(3, 8)))
    return f"{rng.choice(('Say this', 'Please repeat'))}: {said}.", f"You said: {said}."
