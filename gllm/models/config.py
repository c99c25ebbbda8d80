"""A model folder's configuration: config.json and generation_config.json, checked.

Owns what is alike for all families; what a family computes it describes itself. Knows nothing of
tensors; the frontend reads it without torch.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gllm.models.errors import ModelError
from gllm.models.keys import Keys
from gllm.models.registry import architecture_of, family
from gllm.models.spec import Model
from gllm.models.stored import stored_as

DTYPES = ("float32", "bfloat16", "float16")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelConfig:
    """What there is to know of a model before its weights are read."""

    architecture: str
    model: Model
    dtype: str
    """Of the checkpoint: float32, bfloat16 or float16."""
    eos_ids: tuple[int, ...]
    """Token ids that end a text: those of config.json and generation_config.json together."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Defaults of generation_config.json, by the names of SAMPLING."""


def read_config(folder: Path) -> ModelConfig:
    """The configuration of the model in a folder. Raises ModelError that names the key."""
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise ModelError(f"{folder} has no config.json: it is not a Hugging Face model folder")
    generation = _read_json(folder / "generation_config.json") or {}
    architecture = architecture_of(raw.get("architectures"))
    keys = Keys(raw)
    model = replace(family(architecture)(keys), stored=stored_as(keys))
    keys.finish()
    eos_ids = _ids(raw, "eos_token_id") | _ids(generation, "eos_token_id")
    sampling = {key: generation[key] for key in SAMPLING if generation.get(key) is not None}
    return ModelConfig(architecture, model, _dtype(raw), tuple(sorted(eos_ids)), sampling)


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, None where there is no file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _dtype(raw: dict[str, Any]) -> str:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelError(f"config.json: dtype {name!r} is not implemented")
    return str(name)


def _ids(raw: dict[str, Any], key: str) -> set[int]:
    """The ids under a key, which may be one, a list or nothing."""
    value = raw.get(key)
    ids = value if isinstance(value, list) else [value] if value is not None else []
    if not all(isinstance(one, int) and one >= 0 for one in ids):
        raise ModelError(f"{key} is {value!r}, but has to be a token id or a list of them")
    return set(ids)
