"""Tokenizers in other files than tokenizer.json: encodings, chat templates, errors."""

import base64
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken

from gllm.text.conversion.folder import prepare_tokenizer_folder
from gllm.text.conversion.tiktoken_model import PATTERN
from gllm.text.grammar.vocabulary import load_grammar_tokenizer
from gllm.text.tokenizer import Tokenizer
from tests.support.text import tokenizers as some

RANKS = some.byte_ranks()
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = [*some.CORPUS, "", " ", "a  b\n\nc", "DON'T don't 12345 中文和English。", "e\u0301 é"]
NUM_SPECIAL = 24


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def tekken(**changes: Any) -> dict[str, Any]:
    """A tekken.json; ten entries of its vocabulary are beyond the size of its config."""
    ranks = RANKS | {b"beyond %d" % i: len(RANKS) + i for i in range(10)}
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    config = {
        "pattern": WORDS,
        "num_vocab_tokens": len(ranks),
        "default_vocab_size": len(RANKS) + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v3",
    }
    return {"config": config, "vocab": vocabulary, **changes}


def write(folder: Path, **files: Any) -> Path:
    """A folder of JSON files; `__` in a name stands for a dot."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name.replace("__", ".")).write_bytes(text)
    return folder


def test_tekken(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "model", tekken__json=tekken(), config__json={"model_type": "mistral"}
    )
    (folder / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}")
    tokenizer = Tokenizer.load(folder)
    theirs = tiktoken.Encoding("x", pat_str=WORDS, mergeable_ranks=RANKS, special_tokens={})
    for text in TEXTS:
        ids = [NUM_SPECIAL + rank for rank in theirs.encode_ordinary(text)]
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == len(RANKS) + NUM_SPECIAL
    assert tokenizer.special_token_ids == set(range(NUM_SPECIAL))
    assert [tokenizer.id_to_token(i) for i in (0, 2, 3, 23)] == [
        "<unk>",
        "</s>",
        "[INST]",
        "<SPECIAL_23>",
    ]
    assert tokenizer.chat_template is not None
    prompt = tokenizer.chat_template.render([{"role": "user", "content": "Hello"}])
    assert tokenizer.encode(prompt, False)[:2] == [1, 3]
    assert (
        load_grammar_tokenizer(folder, tokenizer.vocab_size, (2,)).vocab_size
        == tokenizer.vocab_size
    )


def test_tekken_with_special_tokens_of_its_own(tmp_path: Path) -> None:
    names = ["<unk>", "<s>", "</s>", "[THINK]"]
    listed = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    tokenizer = Tokenizer.load(
        write(tmp_path / "model", tekken__json=tekken(special_tokens=listed))
    )
    assert tokenizer.encode("[THINK]Hello", False)[0] == 3
    assert tokenizer.id_to_token(4) == "<SPECIAL_4>"


def test_kimi(tmp_path: Path) -> None:
    first = len(RANKS)
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {
            str(first): {"content": "[BOS]", "special": True},
            str(first + 2): {"content": "<|im_end|>", "special": True},
        },
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    data = some.tiktoken_file(RANKS)
    folder = write(tmp_path / "model", tiktoken__model=data, tokenizer_config__json=config)
    tokenizer = Tokenizer.load(folder)
    theirs = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={})
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode_ordinary(text)
    assert tokenizer.vocab_size == first + 256
    assert tokenizer.id_to_token(first + 1) == f"<|reserved_token_{first + 1}|>"
    assert tokenizer.encode("<|im_end|>") == [first + 2]
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.special_tokens["eos_token"] == "<|im_end|>"


def test_the_folder_is_written_once(tmp_path: Path, cache: Path) -> None:
    folder = write(tmp_path / "model", tekken__json=tekken())
    first = prepare_tokenizer_folder(folder)
    assert first.is_relative_to(cache)
    changed = (first / "tokenizer.json").stat().st_mtime_ns
    assert prepare_tokenizer_folder(folder) == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == changed
    write(folder, tokenizer_config__json={"a": 1})
    assert prepare_tokenizer_folder(folder) != first
    (folder / "tokenizer.json").write_text("{}")
    assert prepare_tokenizer_folder(folder) == folder


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"version https://git-lfs", "no tekken file"),
        ({"config": {}}, "no tekken file.*default_num_special_tokens"),
        (tekken(vocab=[]), "single bytes"),
        (tekken(special_tokens=[]), "other numbers of tokens"),
        (tekken(vocab=tekken()["vocab"][:300]), "other numbers of tokens"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, content: Any, named: str) -> None:
    folder = write(tmp_path / "model", tekken__json=content)
    with pytest.raises(ValueError, match=f"tekken.*{named}|{named}"):
        Tokenizer.load(folder)
    assert not list((tmp_path / "cache").rglob("tokenizer.json"))


def test_without_any_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json: pass --tokenizer"):
        Tokenizer.load(write(tmp_path / "model", config__json={}))


def test_chatglm_has_a_script_of_its_own(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "model", tokenizer__model=b"x", config__json={"model_type": "chatglm"}
    )
    with pytest.raises(FileNotFoundError, match="convert_chatglm_tokenizer"):
        Tokenizer.load(folder)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="pip install transformers"):
        Tokenizer.load(write(tmp_path / "model", tokenizer__model=b"x"))


@pytest.mark.full
def test_slow_files_are_converted_by_transformers(tmp_path: Path) -> None:
    backend = some.byte_level()
    folder = write(
        tmp_path / "model",
        tokenizer_config__json={"tokenizer_class": "GPT2Tokenizer"},
        config__json={"model_type": "gpt2"},
    )
    backend.model.save(str(folder))
    tokenizer = Tokenizer.load(folder)
    text = some.CORPUS[0]
    assert tokenizer.encode(text, False) == backend.encode(text).ids


class Converter:
    """AutoTokenizer of transformers: its `from_pretrained` returns or raises one thing."""

    def __init__(self, result: object) -> None:
        self.result = result

    def from_pretrained(self, folder: Path, trust_remote_code: bool) -> object:
        assert not trust_remote_code
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (SimpleNamespace(backend_tokenizer=some.byte_level()), None),
        (ImportError("requires the SentencePiece library"), "installing sentencepiece may help"),
        (RuntimeError("no\nfile"), "cannot convert its tokenizer: no file"),
        (SimpleNamespace(), "no converter for SimpleNamespace: pass --tokenizer"),
    ],
)
def test_what_transformers_converts(
    result: object, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(AutoTokenizer=Converter(result))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    folder = write(tmp_path / "model", tokenizer__model=b"x")
    if said is None:
        assert Tokenizer.load(folder).encode("Hello")
    else:
        with pytest.raises(ValueError, match=said):
            Tokenizer.load(folder)
