"""The word lists of the demo grammar: names, animals, things, places, opposites.

Owns the raw facts of the little world the demo model lives in. It knows nothing of sentences,
chats or splits; those are built from these lists by the other modules.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Animal:
    """A kind of animal and the three facts the model is taught about it."""

    noun: str
    home: str
    sound: str
    food: str


@dataclass(frozen=True)
class Place:
    """Somewhere a scene can happen, with the preposition that goes before it."""

    preposition: str
    noun: str

    def __str__(self) -> str:
        return f"{self.preposition} the {self.noun}"


GIRLS = (
    "Mia", "Lily", "Anna", "Emma", "Nora", "Ella", "Ruby", "Rosa", "Clara", "Lucy", "Zoe", "Ida",
    "Ivy", "Molly", "Luna", "Pippa",
)  # fmt: skip
BOYS = (
    "Ben", "Tom", "Max", "Leo", "Sam", "Finn", "Oscar", "Hugo", "Jack", "Theo", "Noah", "Toby",
    "Felix", "Otto", "Bruno", "Milo",
)  # fmt: skip

ANIMALS = (
    Animal("fox", "in a den", "yip", "berries"),
    Animal("bear", "in a cave", "growl", "honey"),
    Animal("rabbit", "in a burrow", "squeak", "carrots"),
    Animal("owl", "in a hollow tree", "hoot", "moths"),
    Animal("mouse", "in a hole", "squeak", "cheese"),
    Animal("cat", "in a house", "meow", "fish"),
    Animal("dog", "in a kennel", "woof", "bones"),
    Animal("pig", "in a sty", "oink", "turnips"),
    Animal("horse", "in a stable", "neigh", "hay"),
    Animal("cow", "in a barn", "moo", "grass"),
    Animal("frog", "in a pond", "croak", "flies"),
    Animal("duck", "by the water", "quack", "weeds"),
    Animal("squirrel", "in a tree", "chatter", "nuts"),
    Animal("hedgehog", "under a hedge", "snuffle", "beetles"),
    Animal("wolf", "in the woods", "howl", "meat"),
    Animal("lion", "on the plain", "roar", "meat"),
)

THINGS = (
    "kite", "drum", "ball", "boat", "lantern", "bell", "hat", "scarf", "book", "basket", "cup",
    "key", "ring", "whistle", "button", "blanket", "bucket", "flute", "crown", "box", "spoon",
    "coat", "ribbon", "feather", "pillow", "mirror", "candle",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink", "purple", "grey")
PLACES = (
    Place("in", "garden"),
    Place("by", "river"),
    Place("on", "hill"),
    Place("in", "forest"),
    Place("at", "market"),
    Place("in", "meadow"),
    Place("by", "lake"),
    Place("in", "village"),
    Place("on", "beach"),
    Place("in", "orchard"),
    Place("at", "farm"),
    Place("at", "harbour"),
    Place("on", "island"),
    Place("in", "park"),
    Place("at", "school"),
    Place("at", "castle"),
)

COUNTED = (
    "apples", "pears", "plums", "cherries", "eggs", "cakes", "buns", "shells", "stones", "flowers",
    "coins", "acorns",
)  # fmt: skip
LARGEST_ADDEND = 9

OPPOSITES = (
    ("big", "small"),
    ("tall", "short"),
    ("fast", "slow"),
    ("happy", "sad"),
    ("hot", "cold"),
    ("wet", "dry"),
    ("old", "young"),
    ("strong", "weak"),
    ("loud", "quiet"),
    ("clean", "dirty"),
    ("rich", "poor"),
    ("brave", "afraid"),
    ("early", "late"),
    ("awake", "asleep"),
    ("full", "hungry"),
    ("light", "heavy"),
)

TRAITS = (
    "little", "kind", "brave", "cheerful", "shy", "clever", "curious", "gentle", "friendly",
    "lively", "quiet", "merry",
)  # fmt: skip
WEATHERS = ("sunny", "windy", "cloudy", "warm", "cold", "bright", "misty", "frosty")
HOBBIES = (
    "to sing", "to dance", "to paint", "to bake bread", "to climb trees", "to pick flowers",
    "to tell jokes", "to count the clouds", "to swim", "to read", "to play hide and seek",
    "to watch the stars", "to jump over puddles", "to collect stones",
)  # fmt: skip
TREATS = (
    "apple pie", "warm soup", "honey cake", "hot cocoa", "fresh bread", "berry jam",
    "sweet pancakes", "nut cookies", "a bowl of plums", "cold lemonade",
)  # fmt: skip
HIDEOUTS = (
    "under a bush", "behind a big rock", "in the long grass", "between two roots",
    "under an old log", "beside the path", "behind a fence", "in a pile of leaves",
    "next to a wall", "under a wooden bench",
)  # fmt: skip
TRAPS = (
    "in a tall tree", "in the deep mud", "on a high roof", "under a heavy branch",
    "between two rocks", "in a thorny bush", "on a steep ledge", "behind a locked gate",
)  # fmt: skip
TOOLS = (
    "a long rope", "a ladder", "a strong stick", "a wooden plank", "a hook", "a big net",
    "a garden rake", "a fishing line",
)  # fmt: skip
MATERIALS = ("paper", "wood", "wool", "straw", "glue", "string", "clay", "old cloth")
