"""The demo model's tokenizer: byte-level BPE trained on the corpus, saved for Hugging Face.

Owns training, saving and encoding whole texts. Every UTF-8 text can be encoded, as all bytes are
in the alphabet. It knows nothing of the model.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.demo_model.chat import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TURN_END, TURN_START

_ENCODE_BATCH = 4096


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with the chat's special tokens as its first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_all(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:
    """Return the token ids of each text."""
    everything = list(texts)
    encoded: list[np.ndarray] = []
    for start in range(0, len(everything), _ENCODE_BATCH):
        batch = tokenizer.encode_batch(everything[start : start + _ENCODE_BATCH])
        encoded += (np.array(encoding.ids, dtype=np.int64) for encoding in batch)
    return encoded


def trained_positions(tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    """Which tokens of a text the model learns to say: a chat's answers, or all of a bare text.

    What users ask is drawn at random; learning to predict it would only drown the rest in noise.
    """
    starts = np.flatnonzero(tokens == tokenizer.token_to_id(TURN_START))
    if not len(starts):
        return np.ones(len(tokens), dtype=bool)
    trained = np.zeros(len(tokens), dtype=bool)
    for start in starts[tokens[starts + 1] == tokenizer.token_to_id("assistant")]:
        length = int(np.argmax(tokens[start:] == tokenizer.token_to_id(TURN_END)))
        # The markup before the answer, "<|im_start|>assistant\n", is always given.
        trained[start + 3 : start + length + 1] = True
    return trained


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that `AutoTokenizer` reads."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2)
    (folder / "tokenizer_config.json").write_text(f"{text}\n", encoding="utf-8")
