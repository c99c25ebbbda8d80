"""Model folders of emulated engines: config.json and a tokenizer, without weights.

Tools that identify a model by its files find an empty file of weights.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gllm.config.emulation import is_emulated
from gllm.models.errors import ModelError
from gllm.models.hub import DEMO, find_folder, find_local_model, resolve_model
from gllm.models.identity import hash_model
from gllm.models.weight_files import SINGLE
from gllm.options.cache_folder import cache_folder
from gllm.sim.hardware.shapes import MODELS, ModelShape

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
COPIED_FILES = (
    CONFIG,
    TOKENIZER,
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""Files that are copied from a model's own folder."""
NO_TENSORS = b"\x02\0\0\0\0\0\0\0{}"
"""Content of a safetensors file without tensors."""


def resolve_served_model(
    model: str,
    device: str,
    check: Callable[[Path], object] = lambda folder: None,
    check_size: Callable[[int], object] = lambda num_bytes: None,
) -> Path:
    """Return the folder from which a device serves a model, downloaded or written if necessary.

    Args:
        model: as in `prepare_emulated_model` for an emulated device, else as in `resolve_model`.
        device: value of --device.
        check: called with a downloaded folder before its weights; see `resolve_model`.
        check_size: called with the bytes of the weights before they are downloaded.

    Raises:
        ModelError: there is no such model; the message says what to do.
    """
    if is_emulated(device):
        return prepare_emulated_model(model)
    try:
        return resolve_model(model, check=check, check_size=check_size)
    except ModelError as error:
        if model not in MODELS:
            raise
        hint = "as a model of gllm simulate it is served on --device emulated alone"
        raise type(error)(f"{error}; {hint}") from error


def prepare_emulated_model(model: str, root: Path | None = None) -> Path:
    """Return the folder from which an emulated engine serves a model; written if it is missing.

    A model of the simulator's table, or without a tokenizer.json, gets the small tokenizer of the
    demo model, in which texts have more tokens than in the model's own.

    Args:
        model: a model of gllm/sim/hardware/shapes.py, before a folder of this name; or as in
            `resolve_model`.
        root: folder in which it is written; None for one in the user's cache.

    Raises:
        ModelError: there is no such model, or no folder for it; the message says what to do.
    """
    files = {name: (DEMO / name).read_bytes() for name in COPIED_FILES if (DEMO / name).is_file()}
    if model in MODELS:
        name = model
        files[CONFIG] = json.dumps(make_model_config(MODELS[model]), indent=2).encode()
    else:
        folder = resolve_model(model, has_weights=False)
        own = {name: (folder / name).read_bytes() for name in COPIED_FILES if _has(folder, name)}
        files = own if TOKENIZER in own else files | own
        digest = hashlib.sha256(b"\0".join(files[name] for name in sorted(files)))
        name = f"{folder.resolve().name}-{digest.hexdigest()[:12]}"
    target = (root or cache_folder() / "emulated") / name
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in {**files, SINGLE: NO_TENSORS}.items():
            _write(target / name, content)
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written: {error.strerror}: set XDG_CACHE_HOME to another folder"
        ) from error
    return target


def _write(path: Path, content: bytes) -> None:
    """Write a file that other engines may read or write at this moment."""
    if path.is_file() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def find_machine_model(name: str, model_hash: str, own_model: str | None = None) -> Path:
    """Return the folder of a model on this machine that equals the head node's.

    That of an emulated engine has no weights, and is written if it is missing. See
    `find_local_model`.

    Raises:
        ModelError: the model is missing or differs; the message says what to do.
    """
    wanted = own_model or name
    try:
        return find_local_model(name, model_hash, own_model)
    except ModelError:
        prepared = find_emulated_model(wanted)
        if prepared is not None and hash_model(prepared) == model_hash:
            return prepared
        raise


def find_emulated_model(model: str) -> Path | None:
    """Return the folder from which this machine emulates a model, without downloading anything.

    Args:
        model: as in `prepare_emulated_model`.

    Returns:
        None if the model is not on this machine.
    """
    if model in MODELS:
        return prepare_emulated_model(model)
    folder = find_folder(model, has_weights=False)
    return None if folder is None else prepare_emulated_model(str(folder))


def make_model_config(shape: ModelShape) -> dict[str, Any]:
    """Return a config.json of a model with the sizes of a shape.

    The family is one that has such layers, not always the model's own: cost models take the shape.
    """
    values: dict[str, Any] = {
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocabulary,
    }
    experts, latent = shape.experts, shape.latent
    if latent is not None and experts is not None:
        return values | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "first_k_dense_replace": experts.num_dense_layers,
            "kv_lora_rank": latent.kv_rank,
            "moe_intermediate_size": experts.mlp,
            "n_group": 1,
            "n_routed_experts": experts.num_experts,
            "n_shared_experts": experts.num_shared,
            "num_experts_per_tok": experts.num_active,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": latent.query_rank or None,
            "qk_nope_head_dim": latent.nope_dim,
            "qk_rope_head_dim": latent.rope_dim,
            "topk_group": 1,
            "v_head_dim": latent.value_dim,
        }
    values["head_dim"] = shape.head_dim
    if experts is not None:
        return values | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_experts_per_tok": experts.num_active,
            "num_local_experts": experts.num_experts,
            "sliding_window": None,
        }
    return values | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
