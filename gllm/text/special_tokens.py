"""Keep special tokens that a chat's messages and tools spell out as ordinary text.

A chat template writes control tokens (`<|im_end|>`) as text, so a message that contains the same
text would end its own turn. Such text is marked before a template is rendered, and encoded as text
afterwards. Text without special tokens is encoded as usual.
"""

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, Self, SupportsIndex

import tokenizers

SEARCH_CHARACTERS = 2**16
"""Number of characters searched at once; other threads can run in between."""
COMPARED_KEYS = ("role", "type")
"""Keys whose values templates compare: only whole special tokens are marked in them."""


def new_mark() -> str:
    """Return a random text that is inserted into special tokens to mark them as ordinary text."""
    return str(secrets.randbits(128)).zfill(39)


class SpecialTokenMarker:
    """Encodes special tokens that occur in users' messages as ordinary text, not as control tokens.

    They are marked before the chat template is rendered, and the marks are removed at tokenization.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self._ids = {t.content: i for i, t in added.items() if t.special and t.content}
        names = list(self._ids)
        self._pattern = re.compile(_trie_pattern(names) if names else "(?!)")
        self._longest = max(map(len, names), default=0)
        self._beginnings = {name[:end] for name in names for end in range(1, len(name))}
        self._endings = {name[start:] for name in names for start in range(1, len(name))}
        self.may_arise_from_text = backend.normalizer is not None and any(
            token.special and token.normalized for token in added.values()
        )
        """True if normalization may turn other text into a special token."""
        self._text_backend = _without_special_tokens(backend)
        tokens = [token for token in added.values() if token.content in self._ids]
        base = new_mark()
        self._aliases = {t.content: f"{base}{number:08}" for number, t in enumerate(tokens)}
        self._text_backend.add_tokens(
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
            self._text_backend.token_to_id(alias): self._ids[name]
            for name, alias in self._aliases.items()
        }
        self._forbidden_ids = frozenset(self._ids.values()) - {_unknown_id(backend)}
        """Ids that ordinary text must not be encoded as; the unknown token is no control token."""

    def mark_values(self, value: Any, mark: str) -> Any:
        """Return a copy of JSON values with a mark in every special token of their strings.

        The ends of a string are marked as well if they could become part of a special token
        together with the text around the string in the rendered chat.
        """
        if isinstance(value, str):
            return self.mark(value, mark)
        if isinstance(value, list):
            return [self.mark_values(item, mark) for item in value]
        if not isinstance(value, dict):
            return value
        copy = {}
        for key, item in value.items():
            if isinstance(item, str) and key in COMPARED_KEYS:
                copy[key] = self.mark_inside(item, mark)
            elif isinstance(item, str) and key == "arguments":
                copy[self.mark(key, mark)] = self._mark_json(item, mark)
            else:
                copy[self.mark(key, mark)] = self.mark_values(item, mark)
        return copy

    def mark(self, text: str, mark: str) -> str:
        """Return a text with a mark in every special token, and at its ends if necessary."""
        text = self.mark_inside(text, mark)
        body = text.strip()
        if self._overlap(body, self._longest, self._endings, at_end=False):
            start = len(text) - len(text.lstrip())
            text = text[:start] + mark + text[start:]
        if self._overlap(body, self._longest, self._beginnings, at_end=True):
            end = len(text.rstrip())
            text = text[:end] + mark + text[end:]
        return text

    def mark_inside(self, text: str, mark: str) -> str:
        """Return a text with a mark in every special token."""
        pieces, begin = [], 0
        for start, _ in self._find(text, overlapping=True):
            pieces.append(text[begin : start + 1])
            begin = start + 1
        return mark.join([*pieces, text[begin:]])

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Tokenize a rendered chat; marked special tokens become ordinary text."""
        pieces, begin = [], 0
        for start, end in self._find(text):
            pieces += [text[begin:start], self._aliases[text[start:end]]]
            begin = end
        return self.encode_as_text("".join([*pieces, text[begin:]]).replace(mark, ""))

    def encode_as_text(self, text: str) -> list[int]:
        """Tokenize a text in which special tokens are ordinary text."""
        ids = self._encode_text(text)
        originals, forbidden = self._originals, self._forbidden_ids
        if forbidden.isdisjoint(ids):
            return [originals.get(i, i) for i in ids]
        whole: list[int] = []
        for i in ids:
            whole += self._encode_in_parts(i) if i in forbidden else [originals.get(i, i)]
        return whole

    def _encode_text(self, text: str) -> list[int]:
        return self._text_backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode_in_parts(self, token_id: int) -> list[int]:
        """Return the ids of a special token's text, encoded in two parts to avoid the token itself.

        Some models have the text of a special token among their ordinary tokens.
        """
        name = next(name for name, i in self._ids.items() if i == token_id)
        return [i for part in (name[:1], name[1:]) for i in self._encode_text(part)]

    def _mark_json(self, text: str, mark: str) -> str:
        """Return the text of a JSON object marked like `mark`; characters in it may be escaped."""
        if "\\" in text:
            try:
                values = json.loads(text)
                marked = self.mark_values(values, mark)
            except (ValueError, RecursionError):
                return self.mark(text, mark)  # rejected later, with its path
            if marked != values:
                return json.dumps(marked, ensure_ascii=False)
        return self.mark(text, mark)

    def _find(self, text: str, overlapping: bool = False) -> Iterator[tuple[int, int]]:
        """Yield the spans of special tokens from left to right, the longest at each start."""
        position, size = 0, len(text)
        while position < size:
            stop = min(position + SEARCH_CHARACTERS, size)
            match = self._pattern.search(text, position, min(stop + self._longest, size))
            if match is None or match.start() >= stop:
                position = stop
                continue
            yield match.span()
            position = match.start() + 1 if overlapping else match.end()

    @staticmethod
    def _overlap(text: str, longest: int, parts: set[str], at_end: bool) -> bool:
        """Return whether a prefix or suffix of a text is one of these parts of special tokens."""
        sizes = range(1, min(longest, len(text)) + 1)
        return any((text[-size:] if at_end else text[:size]) in parts for size in sizes)


class MarkedText(str):
    """Text with marked special tokens, which a chat template finds as if they were not marked.

    Templates search messages for tokens, as for the end of the reasoning in an earlier answer.

    Args:
        text: The text, marked.
        marker: Marks the strings that are searched.
        mark: Mark of the text.
    """

    _marker: SpecialTokenMarker
    _mark: str

    def __new__(cls, text: str, marker: SpecialTokenMarker, mark: str) -> Self:
        """Return the text."""
        marked = super().__new__(cls, text)
        marked._marker, marked._mark = marker, mark
        return marked

    def __contains__(self, part: object) -> bool:
        return super().__contains__(self._marked(part))

    def count(self, part: str, *bounds: Any) -> int:
        """As str.count."""
        return super().count(self._marked(part), *bounds)

    def find(self, part: str, *bounds: Any) -> int:
        """As str.find."""
        return super().find(self._marked(part), *bounds)

    def rfind(self, part: str, *bounds: Any) -> int:
        """As str.rfind."""
        return super().rfind(self._marked(part), *bounds)

    def index(self, part: str, *bounds: Any) -> int:
        """As str.index."""
        return super().index(self._marked(part), *bounds)

    def startswith(self, prefix: str | tuple[str, ...], *bounds: Any) -> bool:
        """As str.startswith; a mark at the beginning does not count."""
        return super().removeprefix(self._mark).startswith(self._marked(prefix), *bounds)

    def endswith(self, suffix: str | tuple[str, ...], *bounds: Any) -> bool:
        """As str.endswith; a mark at the end does not count."""
        return super().removesuffix(self._mark).endswith(self._marked(suffix), *bounds)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As str.split."""
        return [self._new(part) for part in super().split(self._marked(sep), maxsplit)]

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """As str.rsplit."""
        return [self._new(part) for part in super().rsplit(self._marked(sep), maxsplit)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        """As str.partition."""
        before, found, after = super().partition(self._marked(sep))
        return self._new(before), found, self._new(after)

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        """As str.rpartition."""
        before, found, after = super().rpartition(self._marked(sep))
        return self._new(before), found, self._new(after)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        """As str.replace; the new text is not marked."""
        return self._new(super().replace(self._marked(old), new, count))

    def strip(self, chars: str | None = None) -> str:
        """As str.strip."""
        return self._new(super().strip(chars))

    def lstrip(self, chars: str | None = None) -> str:
        """As str.lstrip."""
        return self._new(super().lstrip(chars))

    def rstrip(self, chars: str | None = None) -> str:
        """As str.rstrip."""
        return self._new(super().rstrip(chars))

    def _new(self, text: str) -> "MarkedText":
        return MarkedText(text, self._marker, self._mark)

    def _marked(self, part: Any) -> Any:
        """Return a searched string, or each of a tuple, with its special tokens marked."""
        if isinstance(part, tuple):
            return tuple(map(self._marked, part))
        return self._marker.mark_inside(part, self._mark) if isinstance(part, str) else part


def _without_special_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return a copy of a tokenizer that treats special tokens as ordinary text.

    It has the same vocabulary, which may take 50 MB and half a second to copy.
    """
    copy = tokenizers.Tokenizer(backend.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (component := getattr(backend, name)) is not None:
            setattr(copy, name, component)
    # In this order they get the same ids.
    copy.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items())])
    copy.encode_special_tokens = True
    return copy


def _unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """Return the id of the token for unknown characters, None if there is none."""
    if isinstance(backend.model, tokenizers.models.Unigram):
        unknown_id = json.loads(backend.model.__getstate__())["unk_id"]
        return unknown_id if isinstance(unknown_id, int) else None
    name = getattr(backend.model, "unk_token", None)
    return None if name is None else backend.token_to_id(name)


def _trie_pattern(names: list[str]) -> str:
    """Return a regular expression for the longest of several strings, as a trie."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if name:
            groups.setdefault(name[0], []).append(name[1:])
    branches = [re.escape(char) + _trie_pattern(rest) for char, rest in groups.items()]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{pattern})?" if "" in names else pattern
