"""Resolution of model names to local folders: the demo, a path, or the Hugging Face hub.

A node without a model searches its own folders for the model that the head names.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from gllm.models.errors import ModelError
from gllm.models.identity import hash_model
from gllm.models.weight_files import INDEX, SINGLE, missing_weights_reason, names_of_index
from gllm.options.exit_status import UnavailableError

_SHOWN = 12
"""Characters of a hash that a message shows."""

DEMO = Path(__file__).parent.parent / "demo"
"""Folder of the model `demo`."""
FILES = [
    "config.json",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "qwen.tiktoken",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
"""Files of a hub repository that are downloaded before the weights. Patterns match whole paths, so
that copies in subfolders are not downloaded."""


class ModelUnreachableError(ModelError, UnavailableError):
    """The model hub cannot be reached now, and the model is not on this machine."""


class HubClient(Protocol):
    """Interface of the methods of huggingface_hub.HfApi that find and download a model's files."""

    def snapshot_download(
        self, name: str, /, *, allow_patterns: list[str], revision: str | None = None
    ) -> str:
        """Download the files of a repository that match; return their folder."""

    def list_repo_files(self, name: str, /, *, revision: str | None = None) -> list[str]:
        """Return the names of all files of a repository."""


def resolve_model(
    model: str,
    hub: HubClient | None = None,
    check: Callable[[Path], object] = lambda folder: None,
    has_weights: bool = True,
) -> Path:
    """Return the folder of a model, downloading it from the Hugging Face Hub if necessary.

    Args:
        model: `demo` for the shipped test model, a path, or the name of a repository on the hub.
        hub: client of the hub; None for huggingface_hub's.
        check: called with the folder before weights are downloaded, when all other files are in it;
            it raises an error for a model that cannot be served.
        has_weights: download the weights too.

    Raises:
        ModelError: there is no such model; the message says what to do.
    """
    if model == "demo":
        return DEMO
    path = _expand_home(model)
    if path.is_dir():
        return path
    if path.is_file():
        kind = "a GGUF file, which is not read" if path.suffix == ".gguf" else "a file"
        raise ModelError(f"{model!r} is {kind}: pass the folder of a model with safetensors")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no folder {model!r}: check the path of the model")
    return _download(model, hub, check, has_weights)


def _expand_home(model: str) -> Path:
    """Return a path with `~` replaced. Raises ModelError if the user has no home directory."""
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        reason = "is in a home directory that is not known: set HOME, or pass a full path"
        raise ModelError(f"{model!r} {reason}") from error


def public_name(model: str) -> str:
    """Return the name of a model for clients: a folder's own name, or the name of a repository.

    Args:
        model: as in `resolve_model`.
    """
    path = _expand_home(model)
    is_folder = model != "demo" and path.is_dir()
    return (path.resolve().name if is_folder else "") or model


def _download(
    name: str, hub: HubClient | None, check: Callable[[Path], object], has_weights: bool
) -> Path:
    """Download a hub repository, its weights if the check passes; return its folder."""
    from huggingface_hub import HfApi

    hub = HfApi() if hub is None else hub
    with _hub_errors(name):
        folder = Path(hub.snapshot_download(name, allow_patterns=FILES))
    if not has_weights:
        return folder
    weights = names_of_index(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    if not all((folder / weight).exists() for weight in weights):
        check(folder)
    # The same commit, even if the repository has changed meanwhile.
    revision = folder.name if folder.parent.name == "snapshots" else None
    with _hub_errors(name):
        folder = Path(hub.snapshot_download(name, allow_patterns=weights, revision=revision))
        if not (folder / weights[0]).exists():
            names = hub.list_repo_files(name, revision=revision)
            raise ModelError(f"model {name!r} {missing_weights_reason(names)}")
    return folder


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Raise the hub's errors about a repository as ModelError that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        reason = "is gated: accept its terms on huggingface.co and set HF_TOKEN"
        raise ModelError(f"model {name!r} {reason}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        reason = "is neither a folder nor a name on huggingface.co (private ones need HF_TOKEN)"
        raise ModelError(f"model {name!r} {reason}") from error
    except (LocalEntryNotFoundError, OSError) as error:
        cause = str(error).partition("\n")[0]
        reason = (
            "is no folder, and huggingface.co cannot be reached and it is not in the local "
            f"cache: pass the path of a model folder, or `demo` for the shipped model ({cause})"
        )
        raise ModelUnreachableError(f"model {name!r} {reason}") from error


def find_local_model(
    name: str, model_hash: str, own_model: str | None = None, cache: Path | None = None
) -> Path:
    """Return the folder of a model on this machine, after checking that it equals the head node's.

    Args:
        name: name or path of the model on the head node.
        model_hash: digest of the head node's model, from `hash_model`.
        own_model: name or path of the model on this machine; None if it is the head node's.
        cache: folder of the hub's cache; None for huggingface_hub's.

    Raises:
        ModelError: the model is missing or differs; the message says what to do.
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


def find_folder(model: str, cache: Path | None = None, has_weights: bool = True) -> Path | None:
    """Return the folder of a model without downloading it; None if it is not on this machine.

    Args:
        model: `demo` for the shipped test model, a path, or the name of a repository on the hub.
        cache: folder of the hub's cache; None for huggingface_hub's.
        has_weights: False for a model whose weights may be missing.
    """
    if model == "demo":
        return DEMO
    path = _expand_home(model)
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        return None
    return _find_in_cache(model, cache, has_weights)


def _find_in_cache(name: str, cache: Path | None, has_weights: bool) -> Path | None:
    # Slow to import, and not needed for folders.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        path = snapshot_download(name, allow_patterns=FILES, local_files_only=True, cache_dir=cache)
        folder = Path(path)
        weights = names_of_index(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    is_complete = all((folder / weight).exists() for weight in weights)
    return folder if is_complete or not has_weights else None
