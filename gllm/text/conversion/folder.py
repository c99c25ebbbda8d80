"""Folders with tokenizer.json for models that publish their tokenizer in other files.

A converted tokenizer is kept in the user's cache: all processes read the same file, and the
conversion takes seconds.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gllm.options.cache_folder import cache_folder, make_folder
from gllm.text.added_tokens import read_json_object
from gllm.text.conversion import slow, tekken, tiktoken_model

FILE = "tokenizer.json"
QWEN_FILE = "qwen.tiktoken"
"""Tokenizer of Qwen's first release, which scripts/convert_qwen_tokenizer.py converts."""
CHATGLM = "chatglm"
"""`model_type` of models whose tokenizer.model scripts/convert_chatglm_tokenizer.py converts."""
CONFIG = "tokenizer_config.json"
COPIED = (
    "config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files that are read beside tokenizer.json."""
FORMAT = 1
"""Number of the folders' content; to be raised when other content is written for the same files."""
MAX_FOLDERS = 32
"""Converted tokenizers that are kept, those used last."""

Converted = tuple[Tokenizer, dict[str, Any]]
"""A tokenizer, and keys of its tokenizer_config.json that the folder does not set."""


def prepare_tokenizer_folder(folder: Path) -> Path:
    """Return a folder with the tokenizer.json of a model: its own, or one in the user's cache.

    A tokenizer in other files is converted into the cache, once.

    Args:
        folder: The model folder.

    Raises:
        FileNotFoundError: The folder has no tokenizer.
        ValueError: A file is invalid or cannot be converted.
    """
    if (folder / FILE).is_file():
        return folder
    convert = _find_converter(folder)
    if convert is None or read_json_object(folder / "config.json").get("model_type") == CHATGLM:
        raise FileNotFoundError(f"{folder} has no {FILE}: {_how_to_get_one(folder)}")
    target = cache_folder() / "tokenizers" / f"{folder.resolve().name[:64]}-{_digest(folder)}"

    def write(temporary: Path) -> None:
        tokenizer, defaults = convert(folder)
        tokenizer.save(str(temporary / FILE), pretty=False)
        for name in COPIED:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, temporary / name)
        if (folder / "additional_chat_templates").is_dir():
            shutil.copytree(
                folder / "additional_chat_templates", temporary / "additional_chat_templates"
            )
        config = defaults | read_json_object(folder / CONFIG)
        (temporary / CONFIG).write_text(json.dumps(config), encoding="utf-8")

    try:
        make_folder(target, FILE, write, MAX_FOLDERS)
    except OSError as error:
        raise ValueError(
            f"{target} cannot be written: {error.strerror}: set XDG_CACHE_HOME to another folder"
        ) from error
    return target


def _find_converter(folder: Path) -> Callable[[Path], Converted] | None:
    """Return the function that converts the tokenizer of a folder; None if it has none."""
    if (folder / tekken.FILE).is_file():
        return lambda folder: tekken.convert_tekken(folder / tekken.FILE)
    if tiktoken_model.is_kimi_folder(folder):
        return lambda folder: (tiktoken_model.convert_kimi(folder), {})
    if any((folder / name).is_file() for name in slow.FILES):
        return lambda folder: (slow.convert_slow(folder), {})
    return None


def _digest(folder: Path) -> str:
    """Return a digest of what identifies the content of a folder's tokenizer files."""
    digest = hashlib.sha256(f"{FORMAT}\0{folder.resolve()}".encode())
    for name in sorted({*COPIED, CONFIG, tekken.FILE, *slow.FILES, "merges.txt"}):
        if (folder / name).is_file():
            status = (folder / name).stat()
            digest.update(f"\0{name}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _how_to_get_one(folder: Path) -> str:
    """Return how to get a tokenizer.json into a folder."""
    if (folder / QWEN_FILE).is_file():
        return f"make it from {QWEN_FILE} with `python -m scripts.convert_qwen_tokenizer {folder}`"
    if (folder / "tokenizer.model").is_file():
        return f"make it with `python -m scripts.convert_chatglm_tokenizer {folder}`"
    return (
        "pass --tokenizer with the folder or the hub name of one, or save one with the model, for "
        "instance by save_pretrained of transformers"
    )
