"""Pooling of an embedding model, from the files that sentence-transformers adds to its folder.

`modules.json` lists the modules that a text passes: the model, the pooling, dense layers, and the
normalization, which the server does in any case.
"""

import json
from pathlib import Path
from typing import Any

from gllm.models.errors import ModelError
from gllm.models.spec.model import DenseSpec, ModelSpec, PoolingSpec
from gllm.models.weight_files import SINGLE

MODULES = "modules.json"
"""File with the list of modules, each a type and a subfolder."""
POOLING_FILES = [MODULES, "*_Pooling/config.json", "*_Dense/config.json"]
"""Files of a hub repository that decide the pooling."""
ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": False,
    "torch.nn.modules.activation.Tanh": True,
}
"""Activation functions of dense layers, and whether they are the hyperbolic tangent."""
LAST_TOKEN = "lasttoken"
MEAN = "mean"


def read_pooling(folder: Path, model: ModelSpec) -> PoolingSpec | None:
    """Read the pooling of an embedding model from `modules.json` (sentence-transformers).

    Args:
        folder: folder of the model.
        model: the model; mean pooling and dense layers need bidirectional attention.

    Returns:
        None for pooling by the last token without dense layers, also if there is no such file.

    Raises:
        ModelError: a file is invalid, or the pooling is not implemented.
    """
    if not (folder / MODULES).is_file():
        return None
    mode, layers = LAST_TOKEN, []
    for module in _read(folder / MODULES, list):
        kind, place = (str(module.get(key, "")) for key in ("type", "path"))
        if Path(place).name != place:
            raise ModelError(f"{MODULES}: path {place!r:.80} is not a subfolder")
        match kind.rpartition(".")[2]:
            case "Pooling":
                mode = _pooling_mode(folder / place / "config.json")
            case "Dense":
                layers.append(_dense_spec(folder, place))
            case "Transformer" | "Normalize":
                pass
            case _:
                raise ModelError(f"{MODULES}: module {kind!r:.80} is not implemented")
    if mode == LAST_TOKEN and not layers:
        return None
    if mode != MEAN or not model.is_bidirectional:
        raise ModelError(
            f"{MODULES}: pooling {mode!r:.40} with {len(layers)} dense layers is not implemented, "
            "only the last token without dense layers, and of models with bidirectional attention "
            f"the mean: remove {MODULES} to embed texts by their last token"
        )
    sizes = [model.hidden_size, *(layer.outputs for layer in layers)]
    for layer, size in zip(layers, sizes, strict=False):
        if layer.inputs != size:
            raise ModelError(f"{layer.folder}: in_features is {layer.inputs}, not {size}")
    return PoolingSpec(tuple(layers))


def dense_weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the weights of a model's dense layers."""
    configs = sorted(folder.glob("*_Dense/config.json"))
    return [f"{path.parent.name}/{SINGLE}" for path in configs]


def _pooling_mode(path: Path) -> str:
    """Return the pooling of a file: the key `pooling_mode`, or the switch that is on."""
    config = _read(path, dict)
    mode = config.get("pooling_mode")
    if mode is not None:
        return str(mode)
    switches = [
        key.removeprefix("pooling_mode_").removesuffix("_tokens")
        for key, value in config.items()
        if key.startswith("pooling_mode_") and value is True
    ]
    return "+".join(switches)


def _dense_spec(folder: Path, place: str) -> DenseSpec:
    """Return the dense layer of a subfolder. Raises ModelError."""
    config = _read(folder / place / "config.json", dict)
    sizes = [config.get(key) for key in ("in_features", "out_features")]
    activation = config.get("activation_function")
    if not all(type(size) is int and size > 0 for size in sizes) or activation not in ACTIVATIONS:
        raise ModelError(
            f"{place}/config.json: in_features and out_features have to be positive integers, and "
            f"activation_function one of {', '.join(ACTIVATIONS)}"
        )
    has_bias = config.get("bias", True) is True
    return DenseSpec(place, sizes[0], sizes[1], has_bias, ACTIVATIONS[activation])


def _read(path: Path, kind: type[Any]) -> Any:
    """Return the content of a JSON file of a type. Raises ModelError."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    is_valid = isinstance(value, kind)
    if is_valid and kind is list:
        is_valid = all(isinstance(module, dict) for module in value)
    if not is_valid:
        raise ModelError(f"{path} does not have the format of sentence-transformers")
    return value
