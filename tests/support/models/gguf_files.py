"""GGUF files for tests, written by ggml's own package."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SIZES: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
"""Metadata of a small Llama."""
CHARACTERS: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "▁ab"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
"""Metadata of a small tokenizer by scores."""
SMALL: dict[str, Any] = SIZES | CHARACTERS


def write_gguf(
    path: Path,
    values: Mapping[str, Any] = SMALL,
    architecture: str = "llama",
    tensors: Mapping[str, Sequence[float]] | None = None,
    rows: int | None = None,
) -> Path:
    """Write a file with metadata and tensors in F32; return its path.

    Args:
        path: the file.
        values: metadata; numbers have the types that llama.cpp's converter gives them.
        architecture: `general.architecture`.
        tensors: further tensors of one dimension, with their numbers.
        rows: rows of the embedding; None for one per token.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    count = len(values.get("tokenizer.ggml.tokens") or ()) if rows is None else rows
    if count:
        writer.add_tensor("token_embd.weight", np.zeros((count, 8), np.float32))
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, np.array(numbers or [0.0], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
