"""Convert the tokenizer of Qwen's first release: qwen.tiktoken to the files that gllm reads.

Converts ranks of byte sequences to merges and adds Qwen's special tokens, chat template and end
tokens, without tiktoken. Writes tokenizer.json, tokenizer_config.json and generation_config.json
into the folder; other keys of the latter two stay.

    python -m scripts.convert_qwen_tokenizer FOLDER
"""

import argparse
import base64
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from gllm.text.tokenizer import BYTE_LEVEL_ALPHABET
from scripts.convert_chatglm_tokenizer import update_json

FILE = "qwen.tiktoken"
END_OF_TEXT, BEGIN_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (
    END_OF_TEXT,
    BEGIN_OF_TURN,
    END_OF_TURN,
    *(f"<|extra_{index}|>" for index in range(205)),
)
"""Special tokens in the order of their ids, which follow the vocabulary."""
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Regular expression of a word; pairs are merged within words only."""
CHAT_FORMAT = "chatml"
"""Value of chat_format in generation_config.json of models that chat."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Ranks = Mapping[bytes, int]
"""Ids of byte sequences. Of all neighbours that join to a sequence, those with the least id of the
result are joined first."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Convert the folder that the command line names."""
    parser = argparse.ArgumentParser(description=f"Qwen's {FILE} to tokenizer.json")
    parser.add_argument("folder", type=Path, help=f"has {FILE}, gets the other files")
    try:
        convert(parser.parse_args(arguments).folder)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def convert(folder: Path) -> None:
    """Write a folder's tokenizer files. Raises ValueError if its qwen.tiktoken is invalid."""
    ranks = parse((folder / FILE).read_bytes())
    build_tokenizer(ranks).save(str(folder / "tokenizer.json"), pretty=False)
    generation_file = folder / "generation_config.json"
    generation = json.loads(generation_file.read_text("utf-8")) if generation_file.is_file() else {}
    ends, changes = [END_OF_TEXT], {"eos_token": END_OF_TEXT}
    if generation.get("chat_format") == CHAT_FORMAT:
        ends = [END_OF_TEXT, BEGIN_OF_TURN, END_OF_TURN]
        changes = {"eos_token": END_OF_TURN, "chat_template": CHAT_TEMPLATE}
    update_json(folder / "tokenizer_config.json", **changes)
    update_json(generation_file, eos_token_id=[len(ranks) + SPECIAL.index(end) for end in ends])


def parse(data: bytes) -> Ranks:
    """Return the content of a tiktoken file: lines of a base64 sequence and its id.

    Raises ValueError unless the ids count from 0 and every single byte has one.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in data.splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
        raise ValueError(f"{FILE} is no tiktoken file: {error}") from error
    if set(ranks.values()) != set(range(len(ranks))):
        raise ValueError(f"{FILE} has ids that are missing or occur twice")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError(f"{FILE} lacks single bytes")
    return ranks


def build_tokenizer(ranks: Ranks) -> Tokenizer:
    """Return a tokenizer with the same encodings, and Qwen's special tokens."""
    letters = {byte: letter for letter, byte in BYTE_LEVEL_ALPHABET.items()}

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {text(token): rank for token, rank in ranks.items()}
    pairs = [(text(left), text(right)) for left, right in merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    if tokenizer.token_to_id(SPECIAL[0]) != len(ranks):
        raise ValueError(f"{FILE} already has one of {', '.join(SPECIAL[:3])}")
    return tokenizer


def merges(ranks: Ranks) -> list[tuple[bytes, bytes]]:
    """Return the two tokens that each longer token is joined from, least id first.

    They remain of its bytes once all pairs with smaller ids are joined. No other pair ever joins to
    the token: no sequence within its bytes has a greater id, so its bytes are joined in this order
    or not at all, whatever surrounds them. Raises ValueError if more than two tokens remain.
    """
    pairs = []
    for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__):
        parts = _join(token, ranks, ranks[token])
        if len(parts) != 2:
            raise ValueError(f"{FILE}: no two tokens with smaller ids make token {ranks[token]}")
        pairs.append((parts[0], parts[1]))
    return pairs


def _join(token: bytes, ranks: Ranks, limit: int) -> list[bytes]:
    """Return the parts of a token after all joins of ids below the limit."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 1:
        joins = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
        best = min(joins)
        if best >= limit:
            break
        at = joins.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


if __name__ == "__main__":
    main()
