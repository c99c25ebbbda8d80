"""Tokenizers of GGUF files against the tokenizers whose vocabularies the files have."""

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from gllm.models.errors import ModelError
from gllm.models.formats.gguf_file import GgufFile
from gllm.models.formats.gguf_metadata import GgufMetadata
from gllm.models.formats.gguf_pre_tokenizers import ALIASES, PRE_TOKENIZERS
from gllm.models.formats.gguf_tokenizer import (
    build_tokenizer,
    build_tokenizer_config,
    find_end_ids,
)
from gllm.text.chat.template import load_chat_template
from gllm.text.tokenizer import Tokenizer as ModelTokenizer
from tests.support.models.gguf_files import CHARACTERS

VOCABULARIES = os.environ.get("GLLM_GGUF_VOCABULARIES", "")
"""Folder of files with encodings that are known to be right, as llama.cpp's sources have them."""
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
CORPUS = [
    "The llama's wool isn't cheap: it costs 1234567 dollars, or 89 euros!",
    "def main():\n    return [i**2 for i in range(100)]  # TODO\r\n\r\n\tpass",
    "Ärger mit Übergrößen, café naïve; наш дом большой; 中文字符和日本語のテキスト, 한국어",
    "  spaces   and\n\n\nlines \t tabs 🦙🦙 x=y+z^2 `code` <tag> $5.00 'quoted' WE'RE I'Ll",
]
"""Texts from which small vocabularies are trained."""
TEXTS = [*CORPUS, "", " ", "\n", " \n \n", "a", " a1b22c333d4444 ", "don't DON'T we'll", "\u0301e"]


def metadata(values: dict[str, Any]) -> GgufMetadata:
    values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return GgufMetadata(Path("a.gguf"), values)


def built(values: dict[str, Any], architecture: str = "llama") -> Tokenizer:
    tokenizer = build_tokenizer(metadata(values), architecture)
    return Tokenizer.from_str(json.dumps(tokenizer, ensure_ascii=False))


def trained(split: pre_tokenizers.PreTokenizer, ignore_merges: bool = False) -> Tokenizer:
    """Return a small tokenizer of bytes, with two special tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def file_values(tokenizer: Tokenizer, pre: str | None) -> dict[str, Any]:
    """Return the metadata that a converter writes for a tokenizer of bytes."""
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [CONTROL if token.startswith("<|") else NORMAL for token in tokens],
        "merges": [" ".join(merge) for merge in merges],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def split_by(*regexes: str) -> pre_tokenizers.PreTokenizer:
    """Return a split by published expressions, then to bytes."""
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, to_bytes])


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
PUBLISHED: dict[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": BYTE_LEVEL,
    "starcoder": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTE_LEVEL]),
    "falcon": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            BYTE_LEVEL,
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    ),
    "llama-bpe": split_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": split_by(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "deepseek-v3": split_by(
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""Words of texts, as divided by the models after which splits are named."""


@pytest.mark.parametrize("pre", PUBLISHED)
def test_bytes_are_encoded_as_by_the_original(pre: str) -> None:
    original = trained(PUBLISHED[pre], ignore_merges=pre == "llama-bpe")
    ours = built(file_values(original, pre))
    for text in [*TEXTS, "x<|end|>y"]:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", [*PRE_TOKENIZERS, *ALIASES])
def test_every_split_keeps_the_text(pre: str) -> None:
    ours = built(file_values(trained(BYTE_LEVEL), pre))
    for text in TEXTS:
        assert ours.decode(ours.encode(text, add_special_tokens=False).ids) == text


def test_a_file_without_a_split_has_llama_cpps_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = file_values(trained(BYTE_LEVEL), None)
    ours, default = built(values), built(values | {"pre": "default"})
    assert ours.to_str() == default.to_str()
    (message,) = caplog.messages
    assert "tokenizer.ggml.pre is missing" in message
    assert "convert the model again" in message


def by_scores(text: str, tokens: Sequence[str], scores: Sequence[float]) -> list[str]:
    """Merge the two neighbours whose token has the highest score, the first of equal ones."""
    score, pieces = dict(zip(tokens, scores, strict=True)), list(text.replace(" ", "▁"))
    while True:
        joined = ["".join(pair) for pair in pairwise(pieces)]
        best = max((score[piece] for piece in joined if piece in score), default=None)
        if best is None:
            return [
                part
                for piece in pieces
                for part in (
                    [piece] if piece in score else map("<0x{:02X}>".format, piece.encode())
                )
            ]
        at = next(i for i, piece in enumerate(joined) if score.get(piece) == best)
        pieces[at : at + 2] = [joined[at]]


def scored_values(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a tokenizer by scores, with tokens of all bytes."""
    text = " ".join(CORPUS).replace(" ", "▁")
    pieces = {text[i : i + n]: -float(n + i / 1000) for n in range(7, 0, -1) for i in range(250)}
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    values = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": [0.0] * 259 + list(pieces.values()),
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return values | changes


@pytest.mark.parametrize("prefix", [None, True, False])
def test_scores_merge_as_in_sentencepiece(prefix: bool | None) -> None:
    values = scored_values(**({} if prefix is None else {"add_space_prefix": prefix}))
    ours = built(values)
    known = values["tokens"][259:], values["scores"][259:]
    for text in TEXTS:
        encoding = ours.encode(text, add_special_tokens=False)
        expected = by_scores(" " * (prefix is not False and bool(text)) + text, *known)
        assert encoding.tokens == expected
        assert ours.decode(encoding.ids) == text


def test_the_space_before_text_follows_every_control_token() -> None:
    ours = built(scored_values())
    tokens = ours.encode("wool</s>wool", add_special_tokens=False).tokens
    assert [token for token in tokens if token.startswith(("▁", "<"))] == ["▁wool", "</s>", "▁wool"]


def with_tokens(**kinds: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer by scores with further tokens of these types."""
    values = scored_values()
    return values | {
        "tokens": [*values["tokens"], *kinds],
        "scores": [*values["scores"], *[-1000.0] * len(kinds)],
        "token_type": [*values["token_type"], *kinds.values()],
    }


def test_user_defined_tokens_are_found_before_merging() -> None:
    values = with_tokens(**{"lamQ": USER_DEFINED, "  ": USER_DEFINED}) | {"add_space_prefix": False}
    ours = built(values)
    tokens = ours.encode("llamQs  x", add_special_tokens=False).tokens
    assert tokens == ["l", "lamQ", "s", "  ", "x"]
    added = ours.get_added_tokens_decoder()
    assert [token.special for token in added.values()] == [True, True, True, False, False]


def test_control_tokens_of_phi_3_take_the_spaces_behind_them() -> None:
    values = with_tokens(**{"<|user|>": CONTROL})
    user, wool = (values["tokens"].index(token) for token in ("<|user|>", "▁wool"))
    phi3, llama = (
        built(values, name).encode("<|user|>\nwool", add_special_tokens=False).ids
        for name in ("phi3", "llama")
    )
    assert phi3 == [user, wool]
    assert llama[0] == user
    assert len(llama) > 2


def test_unigram_is_encoded_as_by_the_original() -> None:
    original = Tokenizer(models.Unigram())
    original.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    original.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    original.train_from_iterator(CORPUS, trainer)
    pairs = json.loads(original.to_str())["model"]["vocab"]
    values = {
        "model": "t5",
        "tokens": [token for token, _ in pairs],
        "scores": [score for _, score in pairs],
        "token_type": [2, 3] + [1] * (len(pairs) - 2),
        "unknown_token_id": 0,
        "eos_token_id": 1,
    }
    ours = built(values)
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert ours.encode(text).ids == [*ids, 1]
    squeezed = built(values | {"remove_extra_whitespaces": True})
    assert squeezed.encode("  The   wool ").ids == ours.encode("The wool").ids


def test_text_with_merges_has_bytes_for_unknown_characters() -> None:
    tokens = ["<pad>", "<bos>", "▁", "a", "b", "▁a", "▁ab", "\n", "\n\n"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    values = {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * 7 + [6] * 256,
        "merges": ["▁ a", "▁a b", "\n \n"],
        "bos_token_id": 1,
    }
    ours = built(values)
    assert ours.encode(" ab\n\né a").tokens == ["<bos>", "▁ab", "\n\n", "<0xC3>", "<0xA9>", "▁a"]
    assert ours.decode(ours.encode(" ab\n\né a").ids) == " ab\n\né a"


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({}, []),
        ({"add_bos_token": True}, [0]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 1]),
        ({"pre": "llama-bpe"}, [0]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
        ({"add_bos_token": True, "bos_token_id": None}, []),
        # Converters write -1 as an unsigned number.
        ({"add_bos_token": True, "bos_token_id": 2**32 - 1}, []),
    ],
)
def test_texts_begin_and_end_as_the_file_says(changes: dict[str, Any], ids: list[int]) -> None:
    values = file_values(trained(BYTE_LEVEL), "gpt-2") | changes
    assert built(values).encode("").ids == ids


def test_named_tokens_and_templates_reach_chats(tmp_path: Path) -> None:
    values = CHARACTERS | {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        "tokenizer.chat_template.tool_use": "{{ tools|length }}",
    }
    config = build_tokenizer_config(GgufMetadata(Path("a.gguf"), values))
    assert {name: config[f"{name}_token"] for name in ("bos", "eos", "unk")} == {
        "bos": "<s>",
        "eos": "</s>",
        "unk": "<unk>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render([{"role": "user", "content": "ab"}]) == "<s>ab</s>"
    assert template.supports_tools


def test_the_whole_vocabulary_loads(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(GgufMetadata(Path("a.gguf"), CHARACTERS), "llama")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    ours = ModelTokenizer.load(tmp_path)
    assert ours.encode("ab ab") == [1, 8, 8]
    assert ours.decode([1, 8, 8]) == "ab ab"
    assert ours.vocab_size == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "rwkv"}, r"model 'rwkv' is not implemented, only gpt2, llama"),
        ({"model": None}, r"lacks the key 'tokenizer\.ggml\.model'"),
        ({"pre": "someone's"}, r"pre \"someone's\" is not implemented, only these are: bloom"),
        ({"tokens": None}, r"lacks the key 'tokenizer\.ggml\.tokens'"),
        ({"merges": None}, r"lacks the key 'tokenizer\.ggml\.merges'"),
        ({"merges": ["a nothing"]}, r"merges has 'a nothing', of which the vocabulary lacks"),
        ({"merges": ["ab"]}, r"merges has 'ab'"),
        ({"token_type": [1]}, r"token_type is a list of 1, but has to be a list of \d+ numbers"),
        (
            {"add_bos_token": True, "bos_token_id": "x"},
            r"bos_token_id is 'x', but has to be an integer",
        ),
        ({"add_bos_token": 1}, r"add_bos_token is 1, but has to be true or false"),
    ],
)
def test_a_bad_key_is_named(changes: dict[str, Any], said: str) -> None:
    values = file_values(trained(BYTE_LEVEL), "gpt-2") | changes
    with pytest.raises(ModelError, match=f"a.gguf.*{said}"):
        built(values)


def word_piece_values(**changes: Any) -> dict[str, Any]:
    """Return the metadata of WordPiece, in which tokens that begin a word begin with a space."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = ["▁he", "▁hello", "llo", "l", "s", "o", "▁w", "or", "▁ll", "▁,", "▁中", "▁cafe", "▁HE"]
    return {
        "model": "bert",
        "tokens": special + words,
        "token_type": [CONTROL] * len(special) + [NORMAL] * len(words),
        "padding_token_id": 0,
        "unknown_token_id": 1,
        "cls_token_id": 2,
        "seperator_token_id": 3,
    } | changes


def marked_words() -> Tokenizer:
    """Return the same vocabulary as BERT's own files have it."""
    values = word_piece_values()
    vocabulary = {
        token if kind == CONTROL else token[1:] if token[0] == "▁" else f"##{token}": index
        for index, (token, kind) in enumerate(
            zip(values["tokens"], values["token_type"], strict=True)
        )
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "Hello hellos, he WORLD ll",
        "l hel\tCafé中llo\n,he[SEP]hello",
        "hello" * 20,
        "hello" * 21,
        "",
    ],
)
def test_word_piece(text: str) -> None:
    theirs = marked_words().encode(text)
    ours = built(word_piece_values())
    assert ours.encode(text, add_special_tokens=False).ids == theirs.ids
    assert ours.encode(text).ids == [2, *theirs.ids, 3]


def test_word_piece_keeps_case() -> None:
    ours = built(word_piece_values(**{"normalizer.lowercase": False, "add_eos_token": False}))
    assert ours.encode("he HE Café").tokens == ["[CLS]", "▁he", "▁HE", "[UNK]"]
    assert ours.decode(ours.encode("hello hellos").ids) == "hello hellos"


def test_word_piece_needs_an_unknown_token() -> None:
    with pytest.raises(ModelError, match=r"lacks the key 'tokenizer\.ggml\.unknown_token_id'"):
        built(word_piece_values(unknown_token_id=None))


def test_a_token_twice_is_an_error() -> None:
    values = scored_values()
    values["tokens"] = [*values["tokens"][:-1], "<unk>"]
    with pytest.raises(ModelError, match="has '<unk>' twice"):
        built(values)


def test_a_token_without_bound_is_an_error() -> None:
    values = scored_values()
    values["tokens"] = [*values["tokens"][:-1], "a" * 1025]
    with pytest.raises(ModelError, match="has 1025 characters, but may have 1024"):
        built(values)


def test_empty_tokens_get_names() -> None:
    values = scored_values()
    values["tokens"] = [*values["tokens"][:-1], ""]
    last = len(values["tokens"]) - 1
    assert built(values).id_to_token(last) == f"[EMPTY_{last}]"


def test_an_id_outside_the_vocabulary_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    values = scored_values(eos_token_id=70_000)
    assert find_end_ids(metadata(values)) == []
    assert "eos_token_id is 70000" in caplog.messages[0]


def test_added_tokens_are_those_of_the_file() -> None:
    added = built(scored_values()).get_added_tokens_decoder()
    assert added[1] == AddedToken("<s>", special=True, normalized=False)
    assert sorted(added) == [0, 1, 2]


GOLDEN = sorted(Path(VOCABULARIES).glob("*.gguf.inp")) if VOCABULARIES else []


@pytest.mark.skipif(not GOLDEN, reason="GLLM_GGUF_VOCABULARIES names no folder with encodings")
@pytest.mark.parametrize("texts", GOLDEN, ids=lambda path: path.name)
def test_real_vocabularies(texts: Path) -> None:
    file = GgufFile(texts.with_suffix(""))
    values = GgufMetadata(file.path, file.metadata)
    ours = Tokenizer.from_str(json.dumps(build_tokenizer(values, file.architecture)))
    inputs = texts.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    # The encoding of an empty text at the end is an empty line.
    lines = texts.with_suffix(".out").read_text().split("\n")
    assert len(lines) >= len(inputs)
    for text, line in zip(inputs, lines, strict=False):
        assert ours.encode(text, add_special_tokens=False).ids == list(map(int, line.split())), text
