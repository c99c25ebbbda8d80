"""Write a model whose tokens weigh as much on a link as those that MoLink sends of Qwen2-7B.

Hidden states of 3,584 elements in float32 are 14,336 bytes per token, as are hidden states and
residual of Qwen2-7B in 16 bits, which MoLink sends as two tensors. Everything else is thin, so that
computing costs little and links set the times: one layer per stage with two heads of 32, an MLP of
16 and a vocabulary of bytes. The weights are random and say nothing.

Run as `python -m benchmarks.weak_model FOLDER`, then serve the folder with --dtype float32.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN_SIZE = 3584
ITEM_BYTES = 4
"""Bytes per element of float32."""
TOKEN_BYTES = HIDDEN_SIZE * ITEM_BYTES
"""Bytes per token between two stages."""
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 1, 32
INTERMEDIATE_SIZE = 16
CONTEXT = 8192
"""Longest text in tokens."""
END_TOKEN = "<|end|>"
NUM_BYTES = 256
"""Byte tokens; the end of the text follows them."""
VOCAB_SIZE = NUM_BYTES + 1
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
"""Characters that stand for the byte tokens, by token id."""
PRINTABLE = [index for index, piece in enumerate(ALPHABET) if " " < piece <= "~"]
"""Ids of the tokens that the model writes: each is one character of ASCII."""
Array = NDArray[np.float32]


def make_weak_model(
    folder: Path, num_layers: int, hidden_size: int = HIDDEN_SIZE, seed: int = 0
) -> Path:
    """Write configuration, random weights and a tokenizer of bytes; return the folder.

    Args:
        folder: is created if it does not exist.
        num_layers: number of layers: one per stage.
        hidden_size: elements per token.
        seed: of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": NUM_BYTES,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = dict(_make_tensors(np.random.default_rng(seed), num_layers, hidden_size))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_TOKEN}) + "\n")
    return folder


def _make_tensors(
    random: np.random.Generator, num_layers: int, hidden_size: int
) -> Iterator[tuple[str, Array]]:
    """Yield names and weights; a linear layer keeps the size of its input."""

    def linear(num_outputs: int, num_inputs: int) -> Array:
        weight = random.standard_normal((num_outputs, num_inputs), dtype=np.float32)
        return weight * np.float32(1 / np.sqrt(num_inputs))

    ones = np.ones(hidden_size, dtype=np.float32)
    yield "model.embed_tokens.weight", random.standard_normal((VOCAB_SIZE, hidden_size), np.float32)
    shapes = {
        "self_attn.q_proj": (NUM_HEADS * HEAD_DIM, hidden_size),
        "self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, hidden_size),
        "self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, hidden_size),
        "self_attn.o_proj": (hidden_size, NUM_HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE_SIZE, hidden_size),
        "mlp.up_proj": (INTERMEDIATE_SIZE, hidden_size),
        "mlp.down_proj": (hidden_size, INTERMEDIATE_SIZE),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in shapes.items():
            yield f"{prefix}{name}.weight", linear(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", ones
    yield "model.norm.weight", ones
    head = np.zeros((VOCAB_SIZE, hidden_size), np.float32)
    head[PRINTABLE] = linear(len(PRINTABLE), hidden_size)
    yield "lm_head.weight", head


def _make_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token per byte."""
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True)])
    return tokenizer


def main() -> None:
    """Write the model to a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=3, help="one per stage")
    options = parser.parse_args()
    print(make_weak_model(options.folder, options.layers))


if __name__ == "__main__":
    main()
