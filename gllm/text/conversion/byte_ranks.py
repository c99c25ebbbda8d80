"""Tokenizers of byte sequences with ranks, as tiktoken computes them.

Of all neighbours that join to a ranked sequence, those with the least rank of the result are joined
first; a word that has a rank itself is one token.
"""

import base64
from collections.abc import Iterable, Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from gllm.text.byte_alphabet import BYTE_LEVEL_ALPHABET

Ranks = Mapping[bytes, int]
"""Ranks of byte sequences, which count from 0."""


def parse_ranks(data: bytes, name: str) -> dict[bytes, int]:
    """Return the content of a tiktoken file: lines of a sequence in base64 and its rank.

    Args:
        data: Content of the file.
        name: Name of the file, for errors.

    Raises:
        ValueError: The file is invalid; the message names it.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in data.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
        raise ValueError(f"{name} is no tiktoken file: {error}") from error
    check_ranks(ranks, name)
    return ranks


def check_ranks(ranks: Ranks, name: str) -> None:
    """Raise ValueError unless the ranks count from 0 and every single byte has one."""
    if set(ranks.values()) != set(range(len(ranks))):
        raise ValueError(f"{name} has ids that are missing or occur twice")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError(f"{name} lacks single bytes")


def build_byte_tokenizer(
    ranks: Ranks, pattern: str, special_tokens: Iterable[AddedToken], num_leading: int = 0
) -> Tokenizer:
    """Return a tokenizer with the encodings of tiktoken.

    Args:
        ranks: Ranks of byte sequences.
        pattern: Regular expression of a word; sequences are joined within words only.
        special_tokens: Special tokens in the order of their ids.
        num_leading: Number of special tokens before the vocabulary, which shift its ids; the others
            follow it.
    """
    letters = {byte: letter for letter, byte in BYTE_LEVEL_ALPHABET.items()}
    table = str.maketrans({chr(byte): letter for byte, letter in letters.items()})

    def text(token: bytes) -> str:
        return token.decode("latin-1").translate(table)

    tokens = list(special_tokens)
    vocabulary = {token.content: index for index, token in enumerate(tokens[:num_leading])}
    vocabulary |= {text(token): rank + num_leading for token, rank in ranks.items()}
    pairs = [(text(left), text(right)) for left, right in find_merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(tokens)
    return tokenizer


def find_merges(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """Return all pairs of tokens that join to another token, those of the least rank first."""
    pairs = []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs += [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
    return pairs
