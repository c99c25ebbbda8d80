"""Model folders of GGUF files: configuration and tokenizer from a file's metadata, and links to it.

Everything that serves a model reads a folder, so a GGUF file becomes one in the user's cache. The
folder's name has a digest of the file's path, size and time of change, so a file that has changed
gets another folder.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from gllm.models.errors import ModelError
from gllm.models.formats.gguf_config import build_config, build_generation_config
from gllm.models.formats.gguf_header import GgufHeader
from gllm.models.formats.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from gllm.models.weight_files import INDEX, SINGLE
from gllm.options.cache_folder import cache_folder, make_folder

SUFFIX = ".gguf"
"""Ending of GGUF files."""
WHOLE, PART = "model.gguf", "model-{:05}-of-{:05}.gguf"
"""Names of the links to the weights in the folders: to the only file, or to one part."""
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
"""Name of a part of a split file."""
FORMAT = 1
"""Number of the folders' content; to be raised when other content is written for the same file."""
MAX_FOLDERS = 32
"""Folders that are kept, those used last."""
MAX_NAME = 64
"""Longest part of a folder's name that is of the file's, in characters."""


def make_gguf_folder(path: Path) -> Path:
    """Return the model folder of a GGUF file in the user's cache, written if it is missing.

    Args:
        path: the file, or one part of a split one.

    Raises:
        ModelError: the file is invalid, not implemented or no language model, or a part is missing.
    """
    parts = [part.absolute() for part in find_parts(path)]
    target = cache_folder() / "gguf" / f"{gguf_stem(path.name)[:MAX_NAME]}-{_digest(parts)}"
    try:
        make_folder(
            target,
            "config.json",
            lambda folder: _write_files(folder, parts),
            MAX_FOLDERS,
            _is_stale,
        )
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written: {error.strerror}: set XDG_CACHE_HOME to another folder"
        ) from error
    return target


def gguf_stem(name: str) -> str:
    """Return the name of a GGUF file without its ending, and without the number of its part."""
    split = SPLIT_NAME.fullmatch(name)
    return split["stem"] if split else name.removesuffix(SUFFIX)


def find_parts(path: Path) -> list[Path]:
    """Return the parts of a split file in order, or the only file. Raises ModelError."""
    split = SPLIT_NAME.fullmatch(path.name)
    if split is None:
        return [path]
    paths = [path.with_name(name) for name in part_names(path.name)]
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise ModelError(
            f"{path} is one of {len(paths)} parts, of which {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} missing in {path.parent}: download all parts"
        )
    return paths


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the file of which one part has this name."""
    split = SPLIT_NAME.fullmatch(name)
    if split is None:
        return [name]
    count = int(split["count"])
    return [f"{split['stem']}-{part:05}-of-{count:05}{SUFFIX}" for part in range(1, count + 1)]


def find_only_file(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that has no other weights; None if there is none.

    Raises:
        ModelError: the folder has several.
    """
    files = sorted(
        path for path in folder.glob(f"*{SUFFIX}") if not path.name.lower().startswith("mmproj")
    )
    is_made = (folder / "config.json").is_file() and all(
        gguf_stem(path.name) == gguf_stem(WHOLE) for path in files
    )
    if is_made or (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return None
    models = {gguf_stem(path.name): path for path in reversed(files)}
    if len(models) > 1:
        names = ", ".join(path.name for path in sorted(models.values())[:8])
        raise ModelError(f"{folder} has {len(models)} GGUF files: pass one of them: {names}")
    return next(iter(models.values()), None)


def _digest(parts: list[Path]) -> str:
    """Return a digest of what identifies the files' content."""
    digest = hashlib.sha256(f"{FORMAT}".encode())
    for part in parts:
        try:
            status = part.stat()
        except OSError as error:
            raise ModelError(f"{part} cannot be read: {error.strerror}") from error
        digest.update(f"\0{part}\0{status.st_size}\0{status.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _write_files(folder: Path, parts: list[Path]) -> None:
    """Write the files of a model folder, and the links to the weights."""
    model = GgufHeader(parts)
    contents: dict[str, Any] = {
        "config.json": build_config(model),
        "generation_config.json": build_generation_config(model),
        "tokenizer.json": build_tokenizer(model.metadata, model.architecture),
        "tokenizer_config.json": build_tokenizer_config(model.metadata),
    }
    for number, part in enumerate(parts, start=1):
        name = PART.format(number, len(parts)) if len(parts) > 1 else WHOLE
        (folder / name).symlink_to(part)
    for name, content in contents.items():
        text = json.dumps(content, ensure_ascii=False, indent=None if "tok" in name else 2)
        (folder / name).write_text(text, encoding="utf-8")


def _is_stale(folder: Path) -> bool:
    """Return True for the folder of a file that is gone."""
    links = [path for path in folder.glob(f"*{SUFFIX}") if path.is_symlink()]
    return any(not link.exists() for link in links)
