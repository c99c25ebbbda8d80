"""The little template language of the grammar: free choices and slots.

Owns the expansion of ``(a|b|)`` and ``{slot}`` and the list of the words a template can produce.
It knows nothing of what the templates say.
"""

import random
import re
from collections.abc import Iterable, Mapping

_INNERMOST_CHOICE = re.compile(r"\(([^()]*)\)")
_SLOT = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"[A-Za-z]+|[0-9]+")
_SPACE_BEFORE_MARK = re.compile(r"\s+([,.!?])")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without any punctuation."""
    return _WORD.findall(text.lower())


def expand(template: str, slots: Mapping[str, str], rng: random.Random) -> str:
    """Make every choice of the template at random, fill its slots and tidy the spaces."""
    text = template
    while "(" in text:
        text = _INNERMOST_CHOICE.sub(lambda match: rng.choice(match[1].split("|")), text)
    text = _SLOT.sub(lambda match: slots[match[1]], text)
    text = _SPACE_BEFORE_MARK.sub(r"\1", " ".join(text.split()))
    return text[0].upper() + text[1:]


def template_words(templates: Iterable[str]) -> set[str]:
    """Every word some expansion of the templates may contain, apart from what fills the slots."""
    return {word for template in templates for word in words(_SLOT.sub(" ", template))}
