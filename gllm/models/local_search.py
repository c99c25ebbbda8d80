"""Search for a model on this machine, without network: the model that the head of an engine serves.

The head names its model as its own command line does, which may be a path that only it has.
"""

from pathlib import Path

from gllm.models.errors import ModelError
from gllm.models.hub import DEMO, FILES
from gllm.models.identity import hash_model
from gllm.models.weight_files import INDEX, SINGLE, names_of_index

_SHOWN = 12
"""Characters of a hash that a message shows."""


def find_local_model(
    name: str, model_hash: str, own_model: str | None = None, cache: Path | None = None
) -> Path:
    """Return the folder of a model on this machine; its hash is that of the head's.

    Args:
        name: name or path of the model on the head.
        model_hash: digest of the head's model.
        own_model: name or path of the model on this machine; None for the head's.
        cache: folder of the hub's cache; None for the one that huggingface_hub has.

    Raises:
        ModelError: the model is not here, or another one is; the message says what to do.
    """
    wanted = own_model or name
    folder = find_folder(wanted, cache)
    if folder is None:
        raise ModelError(
            f"the model {wanted!r} is not on this machine: copy the head's folder of it here and "
            "pass --model FOLDER, or download it here before, with `hf download`"
        )
    own_hash = hash_model(folder)
    if own_hash != model_hash:
        raise ModelError(
            f"the model in {folder} (hash {own_hash[:_SHOWN]}) differs from that of the head "
            f"({name!r}, hash {model_hash[:_SHOWN]}): copy the head's files here, or pass --model "
            "FOLDER of the same model"
        )
    return folder


def find_folder(model: str, cache: Path | None = None) -> Path | None:
    """Return the folder of `demo`, a path or a hub repository in the local cache."""
    if model == "demo":
        return DEMO
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        return None
    return _find_in_cache(model, cache)


def _find_in_cache(name: str, cache: Path | None) -> Path | None:
    # Slow to import, and not needed for folders.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(name, allow_patterns=FILES, local_files_only=True, cache_dir=cache)
        folder = Path(path)
        weights = names_of_index(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    return folder if all((folder / weight).exists() for weight in weights) else None
