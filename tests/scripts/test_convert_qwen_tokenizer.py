"""Qwen's converted tokenizer against tiktoken, and its prompts against the original's way of
putting them together.

The vocabulary is trained here, and written as Qwen's file is: base64 and ids, the bytes first.
"""

import json
import unicodedata
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from gllm.text.byte_alphabet import BYTE_LEVEL_ALPHABET
from gllm.text.detokenizer import IncrementalDetokenizer
from gllm.text.tokenizer import Tokenizer
from scripts.convert_qwen_tokenizer import PATTERN, SPECIAL, main
from tests.support.examples import num_examples
from tests.support.text.tokenizers import CORPUS, tiktoken_file

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = [
    *CORPUS,
    "",
    " ",
    "   \n\n  \t x \r\n\r\n y",
    "I'll say: WE'RE here, it'S 1234567 o'clock!?...  (really)\n",
    "你好，世界。今天天气很好，我们去公园吧！",
    "e\u0301 is é; n\u0303 is ñ; 가 is 가",
    "<|im_start|>system spelled out<|endoftext|>",
    "👩‍🚀🏳️‍🌈 \U0001f9ff",
    "aaaaaaaaaaaaaaaaaaaaa abababababababab",
]


def trained() -> dict[bytes, int]:
    """A vocabulary of 256 bytes and what is joined of them, in the order of joining."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = [(DOCS / name).read_text() for name in ("models.md", "scheduler.md", "sampling.md")]
    backend.train_from_iterator([*pages, *TEXTS * 3], trainer)
    return {
        bytes(BYTE_LEVEL_ALPHABET[letter] for letter in token): rank
        for token, rank in backend.get_vocab().items()
    }


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    return trained()


@pytest.fixture(scope="module")
def folder(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model's folder."""
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "qwen.tiktoken").write_bytes(tiktoken_file(ranks))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "QWenTokenizer"}')
    generation = {"chat_format": "chatml", "eos_token_id": 151643, "top_p": 0.8}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    main([str(folder)])
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def expected(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    special = {token: len(ranks) + i for i, token in enumerate(SPECIAL)}
    return tiktoken.Encoding("Qwen", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def encoded(expected: tiktoken.Encoding, text: str) -> list[int]:
    """As Qwen encodes a text in which special tokens are text."""
    return expected.encode_ordinary(unicodedata.normalize("NFC", text))


def test_encodes_as_tiktoken(tokenizer: Tokenizer, expected: tiktoken.Encoding) -> None:
    pages = [path.read_text() for path in sorted(DOCS.glob("*.md"))]
    for text in [*TEXTS, *pages]:
        ids = tokenizer.encode(text)
        assert ids == expected.encode(unicodedata.normalize("NFC", text), allowed_special="all")
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected.decode(ids)


ALPHABET = "ab'tT re1٣ \t\r\n.,|<你好é\u0301ñß🎉\u00a0"


@given(text=st.text(ALPHABET, max_size=40))
@settings(max_examples=num_examples(200, 5000), deadline=None)
def test_encodes_any_text_as_tiktoken(
    tokenizer: Tokenizer, expected: tiktoken.Encoding, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == encoded(expected, text)
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.push([i])[0] for i in ids]
    assert "".join(pieces) + stream.finish() == unicodedata.normalize("NFC", text)


def test_special_tokens_follow_the_vocabulary(
    tokenizer: Tokenizer, ranks: dict[bytes, int]
) -> None:
    assert tokenizer.vocab_size == len(ranks) + 208
    assert [tokenizer.id_to_token(len(ranks) + i) for i in range(208)] == list(SPECIAL)
    assert tokenizer.special_token_ids == set(range(len(ranks), len(ranks) + 208))
    assert tokenizer.is_byte_level


def test_prompts_are_put_together_as_the_original_does(
    folder: Path, tokenizer: Tokenizer, expected: tiktoken.Encoding, ranks: dict[bytes, int]
) -> None:
    """Qwen joins ids: for each message the role, a line break, the content."""
    begin, end = len(ranks) + 1, len(ranks) + 2
    chat = [("user", "Hello, 你好"), ("assistant", " Hi!\n\nHow? "), ("user", "  def f():\n  pass")]
    system = ("system", "You are a helpful assistant.")
    for messages in ([system, *chat], [("system", "Be kind.\nAnd brief."), *chat]):
        wanted = []
        for role, text in messages:
            parts = (encoded(expected, part) for part in (role, "\n", text))
            wanted += [begin, *(i for part in parts for i in part), end]
            wanted += encoded(expected, "\n")
        finished = list(wanted)
        wanted += [begin, *encoded(expected, "assistant"), *encoded(expected, "\n")]
        assert tokenizer.chat_template is not None
        said = [{"role": role, "content": text} for role, text in messages]
        for asked in (said, said[1:]) if messages[0] == system else (said,):
            prompt = tokenizer.chat_template.render(asked)
            assert tokenizer.encode(prompt, add_special_tokens=False) == wanted
            whole = tokenizer.chat_template.render(asked, add_generation_prompt=False)
            assert tokenizer.encode(whole, add_special_tokens=False) == finished
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {
        "chat_format": "chatml",
        "eos_token_id": [len(ranks), begin, end],
        "top_p": 0.8,
    }
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    assert config["tokenizer_class"] == "QWenTokenizer"


def test_a_base_model_has_no_chat_template(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(tiktoken_file(ranks))
    with pytest.raises(FileNotFoundError, match="convert_qwen_tokenizer"):
        Tokenizer.load(tmp_path)
    main([str(tmp_path)])
    assert Tokenizer.load(tmp_path).chat_template is None
    ends = json.loads((tmp_path / "generation_config.json").read_text())
    assert ends == {"eos_token_id": [len(ranks)]}


def test_a_folder_without_the_file_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "qwen.tiktoken" in capsys.readouterr().err
