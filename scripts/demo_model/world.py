"""Entities of the demo world, and the split that keeps some combinations of them for testing.

Owns heroes, statements about heroes and the hash that says whether a combination may be used in
training. It knows no sentence: stories and questions are worded elsewhere.
"""

import hashlib
import random
from dataclasses import dataclass
from enum import Enum

from scripts.demo_model import lexicon
from scripts.demo_model.lexicon import Animal, Place

TEST_SHARE = 10


class Split(Enum):
    """Which side of the hash split a statement is drawn from."""

    TRAIN = "train"
    TEST = "test"


@dataclass(frozen=True)
class Hero:
    """A named animal; its full name, as in "Mia the fox", is how sentences introduce it."""

    name: str
    animal: Animal

    @property
    def full_name(self) -> str:
        """Name and animal, such as "Mia the fox"."""
        return f"{self.name} the {self.animal.noun}"

    @property
    def is_girl(self) -> bool:
        """True if the hero has a girl's name."""
        return self.name in lexicon.GIRLS

    @property
    def pronoun(self) -> str:
        """The pronoun that begins a sentence about the hero."""
        return "She" if self.is_girl else "He"


@dataclass(frozen=True)
class Statement:
    """Claim of a text about a hero; parts that the text does not mention are empty.

    ``thing`` is whatever the hero has or is: an object, a sum of objects, or an adjective.
    """

    hero: Hero
    thing: str = ""
    colour: str = ""
    place: str = ""

    @property
    def key(self) -> str:
        """Text that identifies the statement in hashes."""
        return f"{self.hero.full_name}|{self.thing}|{self.colour}|{self.place}"


def is_held_out(statement: Statement) -> bool:
    """Return whether a statement is held out for testing: a fixed tenth, chosen by hash."""
    digest = hashlib.sha256(statement.key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % TEST_SHARE == 0


def all_heroes() -> list[Hero]:
    """Every possible hero, those held out included, in a fixed order."""
    names = lexicon.GIRLS + lexicon.BOYS
    return [Hero(name, animal) for name in names for animal in lexicon.ANIMALS]


HEROES = {
    Split.TRAIN: [hero for hero in all_heroes() if not is_held_out(Statement(hero))],
    Split.TEST: [hero for hero in all_heroes() if is_held_out(Statement(hero))],
}


def draw_hero(rng: random.Random, split: Split, *, unlike: Hero | None = None) -> Hero:
    """Return a hero of the given split that shares neither name nor animal with ``unlike``."""
    while True:
        hero = rng.choice(HEROES[split])
        if unlike is None or (hero.name != unlike.name and hero.animal != unlike.animal):
            return hero


def draw_place(rng: random.Random, *, unlike: Place | None = None) -> Place:
    """Any place but ``unlike``."""
    return rng.choice([place for place in lexicon.PLACES if place != unlike])
