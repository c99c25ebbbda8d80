"""From a model's name to a folder on this machine.

Owns where models come from: the shipped demo, a folder, the Hugging Face hub. Knows nothing of
what is in the folder.
"""

from pathlib import Path

from gllm.models.errors import ModelError

DEMO = Path(__file__).parent.parent / "demo"
PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
"""What is fetched of a hub repository; weights in other formats stay there."""


def resolve(model: str) -> Path:
    """The folder of `demo`, of a path, or of a hub name, downloaded with a progress bar if need be.

    Raises ModelError that says what to do.
    """
    if model == "demo":
        return DEMO
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"there is no folder {model!r}: check the path of the model")
    return _download(model)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
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
        raise ModelError(f"model {name!r} {reason}") from error
