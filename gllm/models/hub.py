"""Resolution of model names to local folders: the demo, a path, a GGUF file, or the hub.

A node without a model searches its own folders for the model that the head names.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

from gllm.models.errors import ModelError
from gllm.models.formats.gguf_folder import (
    SUFFIX,
    find_only_file,
    gguf_stem,
    make_gguf_folder,
    part_names,
)
from gllm.models.hub_download import (
    check_space,
    hub_errors,
    progress_lines,
    silent_bars,
    total_bytes,
)
from gllm.models.identity import hash_model
from gllm.models.packaged_models import PACKAGED_MODELS, find_packaged_file
from gllm.models.pooling_config import POOLING_FILES, dense_weight_files
from gllm.models.weight_files import INDEX, SINGLE, missing_weights_reason, names_of_index

_SHOWN = 12
"""Characters of a hash that a message shows."""

DEMO = Path(__file__).parent.parent / "demo"
"""Folder of the model `demo`."""
TOKENIZER_FILES = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
"""Files of a hub repository that a tokenizer needs."""
FILES = [*TOKENIZER_FILES, *POOLING_FILES, "generation_config.json", INDEX]
"""Files of a hub repository that are downloaded before the weights. Patterns match whole paths, so
that copies in subfolders are not downloaded."""


HUB_FILE = re.compile(r"(?P<repository>[^/:]+/[^/:]+):(?P<file>[^:]+\.gguf)")
"""Name of a GGUF file of a hub repository."""


class HubClient(Protocol):
    """Interface of the methods of huggingface_hub.HfApi that find and download a model's files."""

    def snapshot_download(
        self,
        name: str,
        /,
        *,
        allow_patterns: list[str],
        revision: str | None = None,
        dry_run: bool = False,
        tqdm_class: type[Any] | None = None,
    ) -> Any:
        """Download the files of a repository that match; return their folder.

        With `dry_run`, return what would be downloaded: objects with the fields of FilePlan.
        """

    def list_repo_files(self, name: str, /, *, revision: str | None = None) -> list[str]:
        """Return the names of all files of a repository."""


def resolve_model(
    model: str,
    hub: HubClient | None = None,
    check: Callable[[Path], object] = lambda folder: None,
    has_weights: bool = True,
    check_size: Callable[[int], object] = lambda num_bytes: None,
) -> Path:
    """Return the folder of a model, downloading it from the Hugging Face Hub if necessary.

    Args:
        model: `demo` for the shipped test model, a name of PACKAGED_MODELS, the path of a folder or
            of a GGUF file, the name of a repository on the hub, or REPOSITORY:FILE.gguf.
        hub: client of the hub; None for huggingface_hub's.
        check: called with the folder before weights are downloaded, when all other files are in it;
            it raises an error for a model that cannot be served.
        has_weights: download the weights too.
        check_size: called after `check` with the bytes of the weights, before they are downloaded.

    Raises:
        ModelError: there is no such model; the message says what to do.
    """
    folder = _find_here(model)
    if folder is not None:
        return folder
    if _expand_home(model).is_file():
        raise ModelError(
            f"{model!r} is a file: pass the folder of a model with safetensors, or a GGUF file"
        )
    hub_file = HUB_FILE.fullmatch(model)
    if hub_file is not None:
        return _download_gguf(hub_file["repository"], hub_file["file"], hub)
    if _is_path(model):
        kind = "file" if model.endswith(SUFFIX) else "folder"
        raise ModelError(f"there is no {kind} {model!r}: check the path of the model")
    return _download(model, hub, check, check_size if has_weights else None)


def resolve_tokenizer(name: str | None, model_folder: Path, hub: HubClient | None = None) -> Path:
    """Return the folder of a model's tokenizer, downloading it if necessary.

    Args:
        name: Value of --tokenizer: a folder, a file in it or a hub name; None for the model's own.
        model_folder: Folder of the model.
        hub: Client of the hub; None for huggingface_hub's.

    Raises:
        ModelError: There is no such tokenizer.
    """
    if name is None:
        return model_folder
    folder = find_tokenizer(name)
    if folder is None and _is_path(name):
        raise ModelError(f"there is no tokenizer {name!r}: check the path of --tokenizer")
    if folder is None:
        hub = _client_or_default(hub)
        with hub_errors(name):
            folder = Path(
                hub.snapshot_download(
                    name, allow_patterns=TOKENIZER_FILES, tqdm_class=silent_bars()
                )
            )
    return folder


def find_tokenizer(name: str) -> Path | None:
    """Return the folder of a tokenizer on this machine, without downloading it; None without one.

    Args:
        name: As in `resolve_tokenizer`.
    """
    path = _expand_home(name)
    if path.is_file():
        return path.parent
    if path.is_dir() or name in ("demo", *PACKAGED_MODELS):
        return _find_here(name)
    return None if _is_path(name) else _find_in_cache(name, None, has_weights=False)


def require_tokenizer(name: str | None, model_folder: Path) -> Path:
    """Return the folder of a model's tokenizer on this machine, without downloading it.

    Args:
        name: As in `resolve_tokenizer`.
        model_folder: Folder of the model.

    Raises:
        ModelError: The tokenizer is not on this machine.
    """
    folder = model_folder if name is None else find_tokenizer(name)
    if folder is None:
        raise ModelError(
            f"the tokenizer {name!r} is not on this machine, whose stage enforces grammars with "
            "it: copy its folder here, or download it before, with `hf download`"
        )
    return folder


def _client_or_default(hub: HubClient | None) -> HubClient:
    """Return a client of the hub: the one that is passed, or huggingface_hub's."""
    # Slow to import, and not needed for folders.
    from huggingface_hub import HfApi

    return cast(HubClient, HfApi()) if hub is None else hub


def _find_here(model: str) -> Path | None:
    """Return the folder of a model that needs no hub; None if the name is none of them.

    Raises:
        ModelError: a GGUF file is invalid, a folder has several, or a package is not installed.
    """
    if model == "demo":
        return DEMO
    if model in PACKAGED_MODELS:
        return make_gguf_folder(find_packaged_file(model))
    path = _expand_home(model)
    if path.is_dir():
        file = find_only_file(path)
        return path if file is None else make_gguf_folder(file)
    return make_gguf_folder(path) if path.is_file() and path.suffix == SUFFIX else None


def _is_path(model: str) -> bool:
    """Return True if a name can only be a path."""
    is_relative = model.startswith((".", "~")) or model.count("/") > 1
    return Path(model).is_absolute() or is_relative or ("/" not in model and model.endswith(SUFFIX))


def _expand_home(model: str) -> Path:
    """Return a path with `~` replaced. Raises ModelError if the user has no home directory."""
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        reason = "is in a home directory that is not known: set HOME, or pass a full path"
        raise ModelError(f"{model!r} {reason}") from error


def public_name(model: str) -> str:
    """Return the name of a model for clients: that of a folder, a GGUF file or a repository.

    Args:
        model: as in `resolve_model`.
    """
    path = _expand_home(model)
    if path.suffix == SUFFIX:
        hub_file = HUB_FILE.fullmatch(model)
        return gguf_stem(path.name if hub_file is None else Path(hub_file["file"]).name)
    is_folder = model != "demo" and path.is_dir()
    return (path.resolve().name if is_folder else "") or model


def _download(
    name: str,
    hub: HubClient | None,
    check: Callable[[Path], object],
    check_size: Callable[[int], object] | None,
) -> Path:
    """Download a hub repository, its weights if the checks pass; return its folder.

    No weights are downloaded without `check_size`.
    """
    hub = _client_or_default(hub)
    with hub_errors(name):
        folder = Path(hub.snapshot_download(name, allow_patterns=FILES, tqdm_class=silent_bars()))
        if not (folder / "config.json").is_file():
            names = hub.list_repo_files(name)
            if any(file.endswith(SUFFIX) for file in names):
                raise ModelError(f"model {name!r} {missing_weights_reason(names)}")
    if check_size is None:
        return folder
    weights = names_of_index(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    weights += dense_weight_files(folder)
    if all((folder / weight).exists() for weight in weights):
        return folder
    check(folder)
    # The same commit, even if the repository has changed meanwhile.
    revision = folder.name if folder.parent.name == "snapshots" else None
    with hub_errors(name):
        files = hub.snapshot_download(
            name,
            allow_patterns=weights,
            revision=revision,
            dry_run=True,
            tqdm_class=silent_bars(),
        )
    if files:
        check_space(name, files, folder, None)
        check_size(total_bytes(files))
    with hub_errors(name, is_begun=True):
        bars = progress_lines(name, files)
        hub.snapshot_download(name, allow_patterns=weights, revision=revision, tqdm_class=bars)
        if not (folder / weights[0]).exists():
            names = hub.list_repo_files(name, revision=revision)
            raise ModelError(f"model {name!r} {missing_weights_reason(names)}")
    return folder


def _download_gguf(name: str, file: str, hub: HubClient | None) -> Path:
    """Download a GGUF file of a hub repository, or all of its parts; return its model folder."""
    hub = _client_or_default(hub)
    with hub_errors(name):
        folder = Path(hub.snapshot_download(name, allow_patterns=_gguf_patterns(file)))
        if not (folder / file).is_file():
            names = [name for name in hub.list_repo_files(name) if name.endswith(SUFFIX)]
            known = f"it has {', '.join(names[:12])}" if names else "it has no GGUF file"
            raise ModelError(f"model {name!r} has no file {file!r}: {known}")
    return make_gguf_folder(folder / file)


def _gguf_patterns(file: str) -> list[str]:
    """Return the names of a file of a repository, or of all of its parts."""
    return [str(Path(file).with_name(name)) for name in part_names(Path(file).name)]


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
        model: as in `resolve_model`.
        cache: folder of the hub's cache; None for huggingface_hub's.
        has_weights: False for a model whose weights may be missing.
    """
    folder = _find_here(model)
    if folder is not None:
        return folder
    hub_file = HUB_FILE.fullmatch(model)
    if hub_file is not None:
        return _find_gguf_in_cache(hub_file["repository"], hub_file["file"], cache)
    if _is_path(model):
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


def _find_gguf_in_cache(name: str, file: str, cache: Path | None) -> Path | None:
    """Return the model folder of a GGUF file in the hub's cache; None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    patterns = _gguf_patterns(file)
    try:
        path = snapshot_download(
            name, allow_patterns=patterns, local_files_only=True, cache_dir=cache
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
    files = [Path(path) / pattern for pattern in patterns]
    return make_gguf_folder(files[0]) if all(part.is_file() for part in files) else None
