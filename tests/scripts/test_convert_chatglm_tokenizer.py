"""ChatGLM3's converted tokenizer against SentencePiece, which made the expected encodings, and its
prompts against the original's way of putting them together.

Two small models, trained by SentencePiece 0.2.3 on this project's documents and a few Chinese
sentences: one that takes texts as they are, as ChatGLM3's does, and one that replaces characters
and squeezes spaces.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gllm.text.detokenizer import IncrementalDetokenizer
from gllm.text.tokenizer import Tokenizer
from scripts.convert_chatglm_tokenizer import SPECIAL, main, merges, parse

DATA = Path(__file__).parents[1] / "data"
MODELS = ("identity", "rules")


def content(name: str) -> bytes:
    return (DATA / f"sentencepiece_{name}.model").read_bytes()


def expected(name: str) -> list[dict[str, Any]]:
    lines = (DATA / f"sentencepiece_{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A converted folder of each model; the first has what ChatGLM3's own has."""
    made = {}
    for name in MODELS:
        made[name] = tmp_path_factory.mktemp(name)
        shutil.copy(DATA / f"sentencepiece_{name}.model", made[name] / "tokenizer.model")
        if name == "identity":
            own = {"tokenizer_class": "ChatGLMTokenizer", "padding_side": "left"}
            (made[name] / "tokenizer_config.json").write_text(json.dumps(own))
        main([str(made[name])])
    return made


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", MODELS)
def test_encodes_as_sentencepiece(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer, rows = tokenizers[name], expected(name)
    assert len(rows) > 250
    for row in rows:
        assert tokenizer.encode(row["text"], add_special_tokens=False) == row["ids"], row


@pytest.mark.parametrize("name", MODELS)
def test_decodes_as_sentencepiece(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    for row in expected(name):
        assert tokenizer.decode(row["ids"]) == row["decoded"], row
        stream = IncrementalDetokenizer(tokenizer)
        pieces = [stream.push([i])[0] for i in row["ids"]]
        assert "".join(pieces) + stream.finish() == row["decoded"], row


def test_every_text_begins_as_chatglm_does(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["identity"]
    first = tokenizer.vocab_size - len(SPECIAL)
    plain = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [first + 1, first + 3, *plain]
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    assert [tokenizer.id_to_token(first + i) for i in range(len(SPECIAL))] == list(SPECIAL)


def test_prompts_are_put_together_as_the_original_does(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer]
) -> None:
    """ChatGLM3 joins ids: for each message the role, its line's end, the content."""
    tokenizer = tokenizers["identity"]
    ids = {token: tokenizer.vocab_size - len(SPECIAL) + i for i, token in enumerate(SPECIAL)}
    chat = [
        ("system", "Be kind.\nAnd brief."),
        ("user", "你好"),
        ("assistant", " 你好！ "),
        ("user", ""),
        ("user", "def f():\n    pass"),
    ]
    wanted = [ids["[gMASK]"], ids["<sop>"]]
    for role, text in chat:
        parts = (tokenizer.encode(part, add_special_tokens=False) for part in ("\n", text))
        wanted += [ids[f"<|{role}|>"], *(i for part in parts for i in part)]
    wanted.append(ids["<|assistant|>"])
    assert tokenizer.chat_template is not None
    messages = [{"role": role, "content": text} for role, text in chat]
    prompt = tokenizer.chat_template.render(messages)
    assert tokenizer.encode(prompt, add_special_tokens=False) == wanted
    finished = tokenizer.chat_template.render(messages, add_generation_prompt=False)
    assert prompt == finished + "<|assistant|>"
    ends = json.loads((folders["identity"] / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [2, ids["<|user|>"], ids["<|observation|>"]]


def test_other_keys_stay(folders: dict[str, Path]) -> None:
    config = json.loads((folders["identity"] / "tokenizer_config.json").read_text())
    assert config["padding_side"] == "left"
    assert set(config) == {"tokenizer_class", "padding_side", "chat_template", "eos_token"}


def test_a_folder_without_a_model_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "tokenizer.model" in capsys.readouterr().err


def test_merges_make_better_pieces_first() -> None:
    pieces, _ = parse(content("identity"))
    ranks = {piece.text: i for i, piece in enumerate(pieces)}
    made = [ranks[left + right] for left, right in merges(pieces)]
    assert made == sorted(made)
    assert len(set(made)) < len(made)


def field(number: int, value: bytes) -> bytes:
    """A field of a protobuf message."""
    assert len(value) < 128
    return bytes([number << 3 | 2, len(value)]) + value


UNIGRAM, USER_DEFINED = field(2, bytes([3 << 3, 1])), field(1, field(1, b"x") + bytes([3 << 3, 4]))

A_BYTE = b"<0x41>\x15\x00\x00\x00\x00\x18"
"""The piece of a byte up to its type."""


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "no SentencePiece model of type BPE"),
        (b"not a model", "no protobuf message"),
        (content("identity")[:-1], "no protobuf message"),
        (content("identity") + UNIGRAM, "of type BPE"),
        (content("identity") + USER_DEFINED, r"types \{4\}"),
        (content("identity") + field(3, bytes([5 << 3, 0])), "spaces"),
        (content("identity").replace(A_BYTE + b"\x06", A_BYTE + b"\x01"), "bytes"),
    ],
    ids=["empty", "text", "cut off", "unigram", "user-defined", "spaces", "bytes"],
)
def test_other_models_are_refused(data: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse(data)
