"""Checks of the model on this machine, and of the memory for it."""

from dataclasses import dataclass
from pathlib import Path

from gllm.config.emulation import is_emulated
from gllm.deploy.doctor.finding import Finding, bad, good
from gllm.models.errors import ModelError
from gllm.models.hub import find_folder
from gllm.models.identity import hash_model
from gllm.models.weight_files import find_weight_files
from gllm.runtime.emulation.model_folder import find_emulated_model

MEMORY_MARGIN = 1.1
"""Memory of a worker over that of its weights, without KV cache."""


@dataclass(frozen=True)
class LocalModel:
    """Model found on this machine: its name, folder, digest of its files and size in bytes."""

    name: str
    folder: Path
    digest: str
    num_bytes: int
    """Size of the weight files."""


def check_model(name: str, device: str = "auto") -> tuple[Finding, LocalModel | None]:
    """Check that a model's files are on this machine; return the result and the model, if any.

    Args:
        name: as in `find_folder`, or for an emulated device as in `prepare_emulated_model`.
        device: value of --device.
    """
    try:
        folder = find_emulated_model(name) if is_emulated(device) else find_folder(name)
    except ModelError as error:
        return bad("model", str(error), "pass --model with a folder that has a config.json"), None
    if folder is None:
        text = f"{name!r} is neither a folder here nor in the local cache of the hub"
        fix = f"rsync -a HEAD:FOLDER/ FOLDER/ and pass --model FOLDER, or `hf download {name}`"
        return bad("model", text, fix), None
    try:
        digest = hash_model(folder)
        num_bytes = sum(path.stat().st_size for path in find_weight_files(folder))
    except (ModelError, OSError) as error:
        fix = f"copy the model to {folder} again, with all of its files"
        return bad("model", str(error), fix), None
    size = "no weights" if is_emulated(device) else f"{num_bytes / 2**30:.2f} GiB"
    text = f"{folder}, {size}, hash {digest[:12]}"
    return good("model", text), LocalModel(name, folder, digest, num_bytes)


def check_memory(
    model: LocalModel, num_nodes: int, available_bytes: int, has_gpus: bool
) -> Finding:
    """Check that this machine's share of the weights fits into its memory.

    Args:
        model: the model to serve.
        num_nodes: number of machines that the weights are divided among.
        available_bytes: available memory of the host.
        has_gpus: True if the weights will be in GPU memory, which is not checked.
    """
    share = model.num_bytes / num_nodes
    text = (
        f"1/{num_nodes} of the weights is {share / 2**30:.2f} GiB, "
        f"{available_bytes / 2**30:.2f} GiB of the host's memory are available"
    )
    if has_gpus:
        return good("memory", f"{text}; workers use the GPUs' memory")
    if share * MEMORY_MARGIN > available_bytes:
        needed = -(-int(model.num_bytes * MEMORY_MARGIN) // max(available_bytes, 1))
        return bad(
            "memory",
            text,
            f"end other programs, or use --nnodes {needed} and --pp {needed} or more, or "
            "--quantization int8",
        )
    return good("memory", text)
