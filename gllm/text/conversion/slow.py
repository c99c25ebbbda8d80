"""Convert other tokenizers by transformers, which has a converter for each of its classes."""

from pathlib import Path

from tokenizers import Tokenizer

FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)
"""Files of which a folder with such a tokenizer has one."""
NAMES_IN_ERRORS = ("sentencepiece", "protobuf", "tiktoken")
"""Packages that a converter may need."""


def convert_slow(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder without tokenizer.json, as transformers converts it.

    Code of the folder is not run.

    Raises:
        ValueError: transformers is not installed, or has no converter for this tokenizer.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"{folder} has no tokenizer.json, and transformers, which can convert its tokenizer, "
            "is not installed: pip install transformers sentencepiece"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a converter may raise anything
        cause = " ".join(str(error).split())
        missing = [name for name in NAMES_IN_ERRORS if name in cause.lower()]
        hint = f"; installing {' and '.join(missing)} may help" if missing else ""
        raise ValueError(
            f"{folder} has no tokenizer.json, and transformers cannot convert its tokenizer{hint}: "
            f"{cause:.200}"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ValueError(
            f"{folder} has no tokenizer.json, and transformers has no converter for "
            f"{type(tokenizer).__name__}: pass --tokenizer of a model with the same vocabulary"
        )
    return backend
