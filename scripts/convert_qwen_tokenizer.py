"""Convert the tokenizer of Qwen's first release: qwen.tiktoken to the files that gllm reads.

Converts ranks of byte sequences to merges and adds Qwen's special tokens, chat template and end
tokens, without tiktoken. Writes tokenizer.json, tokenizer_config.json and generation_config.json
into the folder; other keys of the latter two stay.

    python -m scripts.convert_qwen_tokenizer FOLDER
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, normalizers

from gllm.text.conversion.byte_ranks import Ranks, build_byte_tokenizer, parse_ranks
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
    ranks = parse_ranks((folder / FILE).read_bytes(), FILE)
    build_tokenizer(ranks).save(str(folder / "tokenizer.json"), pretty=False)
    generation_file = folder / "generation_config.json"
    generation = json.loads(generation_file.read_text("utf-8")) if generation_file.is_file() else {}
    ends, changes = [END_OF_TEXT], {"eos_token": END_OF_TEXT}
    if generation.get("chat_format") == CHAT_FORMAT:
        ends = [END_OF_TEXT, BEGIN_OF_TURN, END_OF_TURN]
        changes = {"eos_token": END_OF_TURN, "chat_template": CHAT_TEMPLATE}
    update_json(folder / "tokenizer_config.json", **changes)
    update_json(generation_file, eos_token_id=[len(ranks) + SPECIAL.index(end) for end in ends])


def build_tokenizer(ranks: Ranks) -> Tokenizer:
    """Return a tokenizer with the same encodings, and Qwen's special tokens."""
    tokens = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    tokenizer = build_byte_tokenizer(ranks, PATTERN, tokens)
    tokenizer.normalizer = normalizers.NFC()
    if tokenizer.token_to_id(SPECIAL[0]) != len(ranks):
        raise ValueError(f"{FILE} already has one of {', '.join(SPECIAL[:3])}")
    return tokenizer


if __name__ == "__main__":
    main()
