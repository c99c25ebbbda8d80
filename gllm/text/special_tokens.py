"""Special tokens that are only text: those that a chat's messages and tools spell out.

A chat template writes control tokens (`<|im_end|>`) as text, so a message that holds the same text
would end its own turn. Owns the marks that keep such text apart while a template is rendered, and
the encoding of marked text. Text without special tokens never gets here: it is encoded as always.
"""

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

import tokenizers

SEARCHED = 2**16
"""Characters searched at once; a thread that searches lets others run in between."""
STRUCTURAL = ("role", "type")
"""Keys whose values templates compare, so that only whole special tokens are marked in them."""


def new_mark() -> str:
    """Return a mark that no text holds: digits survive JSON and changes of case."""
    return str(secrets.randbits(128)).zfill(39)


class SpecialTokens:
    """The special tokens of one tokenizer, as they are written in text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self._ids = {t.content: i for i, t in added.items() if t.special and t.content}
        names = list(self._ids)
        self._pattern = re.compile(_trie_pattern(names) if names else "(?!)")
        self._longest = max(map(len, names), default=0)
        self._beginnings = {name[:end] for name in names for end in range(1, len(name))}
        self._endings = {name[start:] for name in names for start in range(1, len(name))}
        self.are_normalized = backend.normalizer is not None and any(
            token.special and token.normalized for token in added.values()
        )
        """Whether other text may become one when it is normalized."""
        self._literal = _without_special_tokens(backend)
        tokens = [token for token in added.values() if token.content in self._ids]
        base = new_mark()
        self._aliases = {t.content: f"{base}{number:08}" for number, t in enumerate(tokens)}
        self._literal.add_tokens(
            [
                tokenizers.AddedToken(
                    self._aliases[t.content],
                    single_word=t.single_word,
                    lstrip=t.lstrip,
                    rstrip=t.rstrip,
                    normalized=False,
                    special=False,
                )
                for t in tokens
            ]
        )
        self._originals = {
            self._literal.token_to_id(alias): self._ids[name]
            for name, alias in self._aliases.items()
        }
        self._stray = frozenset(self._ids.values()) - {_unknown_id(backend)}
        """What ordinary text must not become; unknown characters are no control tokens."""

    def mark_all(self, value: Any, mark: str) -> Any:
        """Return a copy of JSON values with a mark inside every special token in their strings.

        The ends of a string are marked as well where its neighbors in the rendered text could make
        a special token of them.
        """
        if isinstance(value, str):
            return self.mark(value, mark)
        if isinstance(value, list):
            return [self.mark_all(one, mark) for one in value]
        if not isinstance(value, dict):
            return value
        copy = {}
        for key, one in value.items():
            if isinstance(one, str) and key in STRUCTURAL:
                copy[key] = self._mark_inside(one, mark)
            elif isinstance(one, str) and key == "arguments":
                copy[self.mark(key, mark)] = self._mark_json(one, mark)
            else:
                copy[self.mark(key, mark)] = self.mark_all(one, mark)
        return copy

    def mark(self, text: str, mark: str) -> str:
        """Return a text with a mark inside every special token, and at its ends where needed."""
        text = self._mark_inside(text, mark)
        body = text.strip()
        if self._overlap(body, self._longest, self._endings, at_end=False):
            start = len(text) - len(text.lstrip())
            text = text[:start] + mark + text[start:]
        if self._overlap(body, self._longest, self._beginnings, at_end=True):
            end = len(text.rstrip())
            text = text[:end] + mark + text[end:]
        return text

    def encode(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered text: special tokens with a mark inside are ordinary text."""
        pieces, begin = [], 0
        for start, end in self._find(text):
            pieces += [text[begin:start], self._aliases[text[start:end]]]
            begin = end
        return self.encode_literally("".join([*pieces, text[begin:]]).replace(mark, ""))

    def encode_literally(self, text: str) -> list[int]:
        """Token ids of a text in which special tokens are ordinary text."""
        ids = self._literal_ids(text)
        originals, stray = self._originals, self._stray
        if stray.isdisjoint(ids):
            return [originals.get(i, i) for i in ids]
        whole: list[int] = []
        for i in ids:
            whole += self._spelled(i) if i in stray else [originals.get(i, i)]
        return whole

    def _literal_ids(self, text: str) -> list[int]:
        return self._literal.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _spelled(self, token_id: int) -> list[int]:
        """A special token in several others: some models have it among their ordinary pieces."""
        name = next(name for name, i in self._ids.items() if i == token_id)
        return [i for part in (name[:1], name[1:]) for i in self._literal_ids(part)]

    def _mark_json(self, text: str, mark: str) -> str:
        """As `mark` for the text of a JSON object, in which characters may be escaped."""
        if "\\" in text:
            try:
                values = json.loads(text)
                marked = self.mark_all(values, mark)
            except (ValueError, RecursionError):
                return self.mark(text, mark)  # refused later, with its place
            if marked != values:
                return json.dumps(marked, ensure_ascii=False)
        return self.mark(text, mark)

    def _mark_inside(self, text: str, mark: str) -> str:
        pieces, begin = [], 0
        for start, _ in self._find(text, overlapping=True):
            pieces.append(text[begin : start + 1])
            begin = start + 1
        return mark.join([*pieces, text[begin:]])

    def _find(self, text: str, overlapping: bool = False) -> Iterator[tuple[int, int]]:
        """Yield where special tokens begin and end, the longest ones from left to right."""
        position, size = 0, len(text)
        while position < size:
            stop = min(position + SEARCHED, size)
            found = self._pattern.search(text, position, min(stop + self._longest, size))
            if found is None or found.start() >= stop:
                position = stop
                continue
            yield found.span()
            position = found.start() + 1 if overlapping else found.end()

    @staticmethod
    def _overlap(text: str, longest: int, parts: set[str], at_end: bool) -> bool:
        """Whether an end of a text is one of these parts of special tokens."""
        sizes = range(1, min(longest, len(text)) + 1)
        return any((text[-size:] if at_end else text[:size]) in parts for size in sizes)


def _without_special_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy of a tokenizer that takes special tokens for ordinary text."""
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = True
    return copy


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """The token that unknown characters become, None where there is none."""
    if isinstance(backend.model, tokenizers.models.Unigram):
        found = json.loads(backend.model.__getstate__())["unk_id"]
        return found if isinstance(found, int) else None
    name = getattr(backend.model, "unk_token", None)
    return None if name is None else backend.token_to_id(name)


def _trie_pattern(names: list[str]) -> str:
    """A regular expression for the longest of several strings, tried character by character."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if name:
            groups.setdefault(name[0], []).append(name[1:])
    branches = [re.escape(char) + _trie_pattern(rest) for char, rest in groups.items()]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{pattern})?" if "" in names else pattern
