"""Configuration of a GGUF file: config.json and generation_config.json from its metadata.

A key of the architecture that its row of FAMILIES does not read is an error, because it may change
the arithmetic.
"""

import numpy as np

from gllm.models.errors import ModelError
from gllm.models.formats.gguf_families import FAMILIES
from gllm.models.formats.gguf_header import EMBEDDING, GgufHeader
from gllm.models.formats.gguf_metadata import REMEDY
from gllm.models.formats.gguf_rope import Config
from gllm.models.formats.gguf_tokenizer import PREFIX, find_end_ids

SAMPLING_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
"""Names of generation_config.json to keys under `general.sampling`."""


HARMLESS = frozenset(
    (
        "attention.causal",
        "mm.tokens_per_image",
        "rope.scaling.finetuned",
        "tensor_data_layout",
        "use_parallel_residual",
        "vocab_size",
    )
)
"""Keys under the architecture's name that change nothing, or say what the family does anyway."""


def build_config(model: GgufHeader) -> Config:
    """Return the content of config.json.

    Raises:
        ModelError: the architecture has no family, or a key is missing, invalid or not read.
    """
    if model.architecture not in FAMILIES:
        raise ModelError(
            f"{model.path} has the architecture {model.architecture!r:.80}, which is not "
            f"implemented: use a model of one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model.architecture]
    config: Config = {"architectures": [family.architecture], "model_type": family.model_type}
    for keys, read in ((family.integers, model.integer), (family.numbers, model.number)):
        for key, name in keys.items():
            if not key.endswith("?") or model.has(key[:-1]):
                config[name] = read(key.removesuffix("?"))
    rows = _check_vocabulary(model)
    config |= {"vocab_size": rows, "torch_dtype": _dtype(model), **family.complete(model)}
    _check_all_read(model)
    return config


def build_generation_config(model: GgufHeader) -> Config:
    """Return the content of generation_config.json: end tokens and defaults of sampling."""
    config: Config = {"eos_token_id": find_end_ids(model.metadata)}
    for name, key in SAMPLING_KEYS.items():
        value = model.metadata.get(f"general.sampling.{key}")
        if value is not None:
            config[name] = float(str(np.float32(value))) if isinstance(value, float) else value
    return config


def _check_vocabulary(model: GgufHeader) -> int:
    """Return the rows of the embedding. Raises ModelError if the vocabulary has another size."""
    rows, count = model.tensors[EMBEDDING][1].shape[0], len(model.metadata.texts(f"{PREFIX}tokens"))
    if rows != count:
        raise ModelError(
            f"{model.path}: {PREFIX}tokens has {count} tokens, but {EMBEDDING!r} {rows} rows: "
            f"{REMEDY}"
        )
    return rows


def _dtype(model: GgufHeader) -> str:
    """Return the dtype of the computation: that of most weights, bfloat16 for those of few bits."""
    sizes: dict[str, int] = {}
    for _, tensor in model.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    kind = max(sizes, key=lambda name: sizes[name])
    # Gemma's activations exceed float16.
    is_half = kind == "F16" and not model.architecture.startswith("gemma")
    return "float32" if kind == "F32" else "float16" if is_half else "bfloat16"


def _check_all_read(model: GgufHeader) -> None:
    """Raise ModelError for a key of the architecture that was not read and may matter."""
    prefix = model.key("")
    for key in model.metadata.keys(prefix):
        is_known = key in model.metadata.read or key[len(prefix) :] in HARMLESS
        if not is_known and model.metadata.get(key):
            raise ModelError(
                f"{model.path}: key {key!r} ({model.metadata.get(key)!r:.80}) is unknown and may "
                "change the arithmetic: use another model, or report the key"
            )
