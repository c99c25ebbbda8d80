"""Convert the tokenizer of Mistral's own format, tekken.json.

Source: the file's fields, as mistral-common reads them. Special tokens have the first ids; the
vocabulary is cut to the size that the file names.
"""

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from gllm.text.conversion.byte_ranks import build_byte_tokenizer, check_ranks

FILE = "tekken.json"
BEGIN, END = "<s>", "</s>"
"""Tokens around a text."""
FIRST_SPECIAL_TOKENS = (
    "<unk>",
    BEGIN,
    END,
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
"""Special tokens of files that list none."""


def convert_tekken(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a tekken.json, and the keys of its tokenizer_config.json.

    Raises:
        ValueError: The file is invalid.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        config = content["config"]
        num_special = int(config["default_num_special_tokens"])
        num_ranks = int(config["default_vocab_size"]) - num_special
        vocabulary = content["vocab"][:num_ranks]
        ranks = {base64.b64decode(each["token_bytes"]): int(each["rank"]) for each in vocabulary}
        listed = content.get("special_tokens")
        names = FIRST_SPECIAL_TOKENS if listed is None else [each["token_str"] for each in listed]
        names = [*names, *(f"<SPECIAL_{index}>" for index in range(len(names), num_special))]
        pattern = str(config["pattern"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no tekken file: {type(error).__name__} {error}") from error
    check_ranks(ranks, FILE)
    if len(ranks) != num_ranks or len(set(names)) != num_special or names[1:3] != [BEGIN, END]:
        raise ValueError(f"{path} has other numbers of tokens than its config")
    tokens = [AddedToken(name, special=True, normalized=False) for name in names]
    tokenizer = build_byte_tokenizer(ranks, pattern, tokens, num_special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, names.index(BEGIN))]
    )
    return tokenizer, {"bos_token": BEGIN, "eos_token": END, "added_tokens_decoder": {}}
