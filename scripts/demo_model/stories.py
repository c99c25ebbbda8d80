"""Short stories about a named hero: draws a scene, picks a plot and words it.

Owns the choice of the plot and of the sentences, and the requests a user may phrase. It knows
nothing of chat markup or of how many stories the corpus holds.
"""

import random
from dataclasses import dataclass

from scripts.demo_model import lexicon
from scripts.demo_model.lexicon import Place
from scripts.demo_model.story_templates import ENDING, HABIT, JOY, OPENING, PLOTS, Step
from scripts.demo_model.templates import expand
from scripts.demo_model.world import Hero, Split, Statement, draw_hero, draw_place, is_held_out

HERO_REQUESTS = (
    "Tell me a story about {hero}.",
    "(Please tell|Tell) me a (short |little |)story about {hero}.",
    "(Can|Could) you tell me a story about {hero}?",
    "(Please write|Write) a (short |little |)story about {hero}.",
    "I (want to|would like to) hear a story about {hero}.",
    "A story about {hero}, please.",
)
NAME_REQUESTS = ("Tell me a (short |)story about {name}.", "Write a story about {name}.")
ANIMAL_REQUESTS = (
    "Tell me a (short |)story about {a_animal}.",
    "(Can|Could) you tell me a story about {a_animal}?",
    "Write a (short |)story about {a_animal}.",
)
OPEN_REQUESTS = (
    "Tell me a (short |little |)story.",
    "(Can|Could) you tell me a story?",
    "Tell me (another|a bedtime) story.",
    "I (want to|would like to) hear a story.",
    "Write a story, please.",
)
PLACE_WISHES = ("It should happen {place}.", "Let it be {place}.", "It takes place {place}.")
THING_WISHES = (
    "There should be a {thing} in it.",
    "Please put a {thing} in it.",
    "It should have a {thing} in it.",
)
REQUESTS = (HERO_REQUESTS, NAME_REQUESTS, ANIMAL_REQUESTS, OPEN_REQUESTS)
REQUEST_WEIGHTS = (76, 6, 10, 8)
REQUEST_TEMPLATES = tuple(
    text for group in (*REQUESTS, PLACE_WISHES, THING_WISHES) for text in group
)


@dataclass(frozen=True)
class Scene:
    """Who and what a story is about; the parts that a user may ask for."""

    hero: Hero
    friend: Hero
    thing: str
    colour: str
    place: Place
    other_place: Place


def article(noun: str) -> str:
    """Return the noun with "a" or "an" before it, by its first letter."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def draw_scene(rng: random.Random, hero: Hero | None = None) -> Scene:
    """Return a scene of training heroes, unless the hero is given, that is not itself held out."""
    while True:
        lead = hero or draw_hero(rng, Split.TRAIN)
        thing, colour = rng.choice(lexicon.THINGS), rng.choice(lexicon.COLOURS)
        place = draw_place(rng)
        if not is_held_out(Statement(lead, thing, colour, str(place))):
            friend = draw_hero(rng, Split.TRAIN, unlike=lead)
            return Scene(lead, friend, thing, colour, place, draw_place(rng, unlike=place))


def request(scene: Scene, rng: random.Random) -> str:
    """Return a user's message asking for the scene's story, now and then with a wish added."""
    sentences = [rng.choice(rng.choices(REQUESTS, REQUEST_WEIGHTS)[0])]
    if rng.random() < 0.15:
        sentences.append(rng.choice(PLACE_WISHES))
    if rng.random() < 0.2:
        sentences.append(rng.choice(THING_WISHES))
    slots = {
        "hero": scene.hero.full_name,
        "name": scene.hero.name,
        "a_animal": article(scene.hero.animal.noun),
        "place": str(scene.place),
        "thing": f"{scene.colour} {scene.thing}",
    }
    return " ".join(expand(sentence, slots, rng) for sentence in sentences)


def _slots(scene: Scene, rng: random.Random) -> dict[str, str]:
    girl, friend_girl = scene.hero.is_girl, scene.friend.is_girl
    trait = rng.choice(lexicon.TRAITS)
    material, second_material = rng.sample(lexicon.MATERIALS, 2)
    other_place = str(scene.other_place)
    return {
        "name": scene.hero.name,
        "hero": scene.hero.full_name,
        "animal": scene.hero.animal.noun,
        "friend": scene.friend.full_name,
        "friend_name": scene.friend.name,
        "friend_him": "her" if friend_girl else "him",
        "he": "she" if girl else "he",
        "He": "She" if girl else "He",
        "his": "her" if girl else "his",
        "His": "Her" if girl else "His",
        "him": "her" if girl else "him",
        "trait": trait,
        "a_trait": article(trait),
        "object": scene.thing,
        "colour": scene.colour,
        "thing": f"{scene.colour} {scene.thing}",
        "place": str(scene.place),
        "place_to": f"to the {scene.place.noun}",
        "place_from": f"from the {scene.place.noun}",
        "place2": other_place,
        "place2_to": f"to the {scene.other_place.noun}",
        "place2_start": other_place[0].upper() + other_place[1:],
        "weather": rng.choice(lexicon.WEATHERS),
        "hobby": rng.choice(lexicon.HOBBIES),
        "treat": rng.choice(lexicon.TREATS),
        "hideout": rng.choice(lexicon.HIDEOUTS),
        "trap": rng.choice(lexicon.TRAPS),
        "tool": rng.choice(lexicon.TOOLS),
        "material": material,
        "material2": second_material,
    }


def _outline(rng: random.Random) -> list[tuple[Step, int]]:
    """Return the steps of one story and how many different sentences each of them gets."""
    problem, attempt, talk, resolve = PLOTS[rng.choice(list(PLOTS))]
    return [
        (OPENING, 1),
        (HABIT, 1),
        (problem, 1),
        (attempt, rng.choice((1, 2))),
        (talk, 1),
        (resolve, 1),
        (JOY, rng.choice((1, 2))),
        (ENDING, rng.choice((1, 1, 2))),
    ]


def tell(scene: Scene, rng: random.Random) -> str:
    """One story about the scene, as a single paragraph."""
    slots = _slots(scene, rng)
    sentences: list[str] = []
    for step, count in _outline(rng):
        # Sentences keep the order in which the step lists them: later ones may build on earlier.
        chosen = sorted(rng.sample(range(len(step)), count))
        sentences += (expand(step[index], slots, rng) for index in chosen)
    return " ".join(sentences)
