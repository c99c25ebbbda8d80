"""The files of a checkpoint: by its index, or the only one; and why there are none.

Knows names and first bytes, no tensors: the frontend downloads by it without torch.
"""

import json
from pathlib import Path

from gllm.models.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
GGUF = "model*.gguf"
"""Names of GGUF files in a folder that was made for them; several are the parts of a split one."""
LFS_HEADER = b"version https://git-lfs"
"""First bytes of a Git LFS pointer, the text file in place of a large file."""


def find_weight_files(folder: Path) -> list[Path]:
    """Return the paths of a model's weight files: safetensors, by their index if any, or GGUF.

    Raises ModelError.
    """
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in names_of_index(index)]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / "config.json").is_file() and (files := sorted(folder.glob(GGUF))):
        return files
    reason = missing_weights_reason(sorted(path.name for path in folder.iterdir()))
    raise ModelError(f"{folder} {reason}")


def names_of_index(index: Path) -> list[str]:
    """Return the sorted safetensors file names that an index file lists. Raises ModelError."""
    if is_lfs_pointer(index):
        raise ModelError(lfs_error(index))
    try:
        content = json.loads(index.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{index} cannot be read as JSON: {error}") from error
    homes = content.get("weight_map") if isinstance(content, dict) else None
    names = set(map(str, homes.values())) if isinstance(homes, dict) else set()
    if not names or not all(name.endswith(".safetensors") for name in names):
        raise ModelError(f"{index} has no usable weight_map from tensors to safetensors files")
    if any(Path(name).name != name for name in names):
        raise ModelError(f"{index} has a weight_map with files outside of its folder")
    return sorted(names)


def missing_weights_reason(names: list[str]) -> str:
    """Return an error text on which unsupported weights a model has, and what to do.

    names: names of the model's files, none of which is a supported weight file.
    """
    if files := [name for name in names if name.endswith(".gguf")]:
        return (
            "has weights in GGUF files: name one of them, as FOLDER/FILE.gguf, or as "
            f"REPOSITORY:FILE.gguf on the hub: {', '.join(files[:8])}"
        )
    if any(name.endswith((".bin", ".pth", ".pt")) for name in names):
        return (
            "has weights in PyTorch's pickle format only; convert them to safetensors "
            "(transformers: from_pretrained, then save_pretrained)"
        )
    return f"has no {SINGLE} and no {INDEX}"


def unreadable_reason(path: Path, error: Exception) -> str:
    """Return the error text for a weight file that cannot be opened, as the system says it.

    error: what the library says, which takes every failure to open a file for a missing one.
    """
    if is_lfs_pointer(path):
        return lfs_error(path)
    try:
        with path.open("rb"):
            return f"{path} cannot be read: {error}"
    except FileNotFoundError:
        return f"{path} is missing: download the model again"
    except PermissionError:
        return f"{path} cannot be read: permission denied for this user; change the file's mode"
    except OSError as cause:
        return f"{path} cannot be read: {cause.strerror}"


def is_lfs_pointer(path: Path) -> bool:
    """Return True if a file is a Git LFS pointer instead of the large file itself."""
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_HEADER)) == LFS_HEADER
    except OSError:
        return False


def lfs_error(path: Path) -> str:
    """Return the error text for a file that is only a Git LFS pointer."""
    return f"{path} is a git-lfs pointer and not the file itself: run `git lfs pull` in its folder"
