"""A tiny random EmbeddingGemma, as sentence-transformers stores it, and its embeddings.

The reference is the model of transformers, with the pooling and the dense layers written out.
"""

import json
from pathlib import Path
from typing import Any

from tests.support.models.tiny_models import SMALL, randomize

OPTIONS = {"head_dim": 10, "sliding_window": 16, "use_bidirectional_attention": True}
DENSE_SIZES = (("2_Dense", 48, 80), ("3_Dense", 80, 40))
"""Folder, inputs and outputs of each dense layer."""
PREFIX = "sentence_transformers.models."


def save_embedding_gemma(folder: Path, **options: Any) -> Any:
    """Write the checkpoint, and return the model of transformers.

    options: further keys of the configuration.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        **SMALL | OPTIONS | {"_sliding_window_pattern": 3, "sliding_window_pattern": 3} | options
    )
    model = randomize(transformers.Gemma3TextModel(config).eval())
    model.save_pretrained(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    modules += [(name, "Dense") for name, _, _ in DENSE_SIZES] + [("4_Normalize", "Normalize")]
    write(
        folder / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": PREFIX + kind}
            for index, (path, kind) in enumerate(modules)
        ],
    )
    switches = {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in MODES}
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 48} | switches)
    for name, inputs, outputs in DENSE_SIZES:
        activation = "torch.nn.modules.linear.Identity"
        config = {"in_features": inputs, "out_features": outputs, "bias": False}
        write(folder / name / "config.json", config | {"activation_function": activation})
        weight = torch.randn(outputs, inputs) * 0.2
        save_file({"linear.weight": weight}, folder / name / "model.safetensors")
    return model


MODES = (
    "cls_token",
    "mean_tokens",
    "max_tokens",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
    "lasttoken",
)


def embed(model: Any, folder: Path, prompt: list[int]) -> Any:
    """Return the embedding [40] float32 of a prompt, not normalized."""
    import torch
    from safetensors.torch import load_file

    with torch.inference_mode():
        hidden = model(torch.tensor([prompt])).last_hidden_state[0].float().mean(dim=0)
        for name, _, _ in DENSE_SIZES:
            hidden = load_file(folder / name / "model.safetensors")["linear.weight"] @ hidden
    return hidden


def write(path: Path, content: Any) -> None:
    """Write a JSON file, with its folder."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
