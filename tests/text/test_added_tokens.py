"""Tokens that files beside tokenizer.json add, held against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from gllm.text.grammar.vocabulary import load_grammar_tokenizer
from gllm.text.tokenizer import Tokenizer
from tests.support.text import tokenizers as some

THINK = {"content": "<think>", "lstrip": False, "rstrip": True, "normalized": False}
TEXT = "Hello <think> <call> world<pad><new>"
CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "added_tokens_decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "402": THINK | {"special": False},
                "403": {"content": "<call>", "special": True, "normalized": False},
            }
        }
    },
    "changed options": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "0": {"content": "<|end|>", "special": True, "rstrip": True, "normalized": False}
            }
        }
    },
    "special_tokens_map": {
        "special_tokens_map.json": {
            "pad_token": "<pad>",
            "eos_token": THINK,
            "extra_special_tokens": ["<new>"],
        }
    },
    "added_tokens": {
        "added_tokens.json": {"<think>": 403, "<call>": 402},
        "special_tokens_map.json": {"eos_token": "<think>"},
    },
    "names in the configuration": {
        "tokenizer_config.json": {"pad_token": "<pad>", "additional_special_tokens": ["<new>"]},
        "added_tokens.json": {"<call>": 402},
    },
    "the configuration hides older files": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"402": THINK | {"special": True}},
            "bos_token": "<|end|>",
        },
        "added_tokens.json": {"<call>": 403},
        "special_tokens_map.json": {"pad_token": "<pad>"},
    },
}


def folder_of(case: str, folder: Path) -> Path:
    some.save(folder, some.byte_level())
    for name, content in CASES[case].items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    folder = folder_of(case, tmp_path)
    ours, theirs = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    ids = theirs.encode(TEXT, add_special_tokens=False)
    assert ours.encode(TEXT, add_special_tokens=False) == ids
    assert ours.vocab_size == len(theirs)
    specials = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special_token_ids == specials
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_grammars_know_them(tmp_path: Path) -> None:
    folder = folder_of("added_tokens_decoder", tmp_path)
    vocabulary = load_grammar_tokenizer(folder, 410, [0])
    assert vocabulary.decode_bytes([402]).endswith(b"<think>")


@pytest.mark.parametrize("name", ["added_tokens.json", "special_tokens_map.json"])
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    (some.save(tmp_path, some.byte_level()) / name).write_text("{")
    with pytest.raises(ValueError, match=f"{name} cannot be read as JSON"):
        Tokenizer.load(tmp_path)
