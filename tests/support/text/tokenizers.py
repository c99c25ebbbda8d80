"""Small tokenizers, trained or put together on the spot.

Owns one of each kind that models ship. Knows nothing of the tests that use them.
"""

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = [
    "Hello world, how are you today? I am fine, thank you very much.",
    "The pipeline moves tokens from stage to stage without bubbles.",
    "Grüße aus Köln, ça va? 你好，世界。こんにちは 🎉🎊 naïve café",
    "def main(argv): return 0  # indented    code\n\tand tabs\n",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: merges over bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken("two words", special=False), AddedToken("é<x>", special=False)]
    )
    return tokenizer


def sentencepiece(strip: bool = True) -> Tokenizer:
    """As Llama 2 (strip) and Gemma: spaces as a lower one eighth block, bytes as a fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["Hello", "world", "o", "h", "ello", ",", "é", "你", "好", "x", "▁", "▁▁", "▁Hello"]
    words += ["▁world", "▁x", "▁o"]
    pieces += words
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5: a Metaspace decoder."""
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: continuations are marked, other tokens begin with a space."""
    words = ["[UNK]", "[CLS]", "hello", "wor", "##ld", "##s", ".", ",", "'", "don", "t", "you"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def byte_ranks(num_joined: int = 100) -> dict[bytes, int]:
    """All bytes, and the ranks of what is joined of them most often in CORPUS."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    texts = [word.encode() for text in CORPUS for word in text.split(" ")]
    parts = [[bytes([byte]) for byte in text] for text in texts]
    for _ in range(num_joined):
        pairs = Counter(pair for word in parts for pair in pairwise(word))
        pair = min(pairs, key=lambda pair: (-pairs[pair], pair))
        ranks.setdefault(b"".join(pair), len(ranks))
        for word in parts:
            for at in range(len(word) - 2, -1, -1):
                if tuple(word[at : at + 2]) == pair:
                    word[at : at + 2] = [b"".join(pair)]
    return ranks


def tiktoken_file(ranks: dict[bytes, int]) -> bytes:
    """As tiktoken writes a vocabulary."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ordered)


def save(folder: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """A model folder with this tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
