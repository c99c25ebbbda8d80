"""The models that peers serve: random weights in the shape of Qwen2.5-0.5B, and its tokenizer.

Two hybrids have as many bytes of weights. Speed does not depend on the values of the weights, so
random weights avoid a download. `python -m benchmarks.cpu.model FOLDER SHAPE` creates a model in
its own process, because torch and the weights take memory and threads.
"""

import json
import shutil
import sys
from itertools import product
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

DEMO = Path(__file__).parents[2] / "gllm" / "demo"
VOCABULARY = 151_936
CONTEXT = 32_768
ROPE_THETA = 1e6
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Entries of config.json of all shapes; the special tokens are the demo tokenizer's."""
DENSE = "qwen2"
"""Shape of the model of all modes but `hybrid`."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    DENSE: (
        "Qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "hidden_size": 896,
            "intermediate_size": 4480,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "conv", "full_attention", "conv"] * 6,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
            "norm_eps": 1e-5,
        },
    ),
    "qwen3.5": (
        "Qwen3_5",
        {
            "hidden_size": 1024,
            "intermediate_size": 3712,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rms_norm_eps": 1e-6,
        },
    ),
}
"""Name of transformers' classes and config.json of each shape: Qwen2.5-0.5B; LFM2 and Qwen3.5-0.8B
with other inner sizes or fewer layers, so that all have as many bytes of weights."""
SEED = 0
SPECIAL_TOKENS, BYTES = 3, 256
PAIRS = ["".join(letters) for letters in product(ascii_lowercase[:20], ascii_uppercase[:20])]
FIRST_WORD = SPECIAL_TOKENS + BYTES + 2 * len(PAIRS)
"""First id of a word.

A text of words is tokenized into the same ids again, for servers that accept only text.
"""
LAYER_PARAMETERS = 896 * (896 + 2 * 128 + 896) + 3 * 896 * 4864
"""Parameters of one layer's matrices that multiply every token."""
BODY_PARAMETERS = 24 * LAYER_PARAMETERS
HEAD_PARAMETERS = VOCABULARY * 896
WEIGHT_BYTES = 2 * (BODY_PARAMETERS + HEAD_PARAMETERS)
"""Bytes of the weights in bfloat16; the head shares the embedding's weights."""
PAIR_FLOPS = 24 * 4 * 896
"""FLOPs per query-key pair: the score and the value's share, in all heads of all layers."""
KV_BYTES = 24 * 2 * 2 * 64 * 2
"""KV cache bytes per token, in 16 bits: layers, keys and values, heads, head size."""


def word(place: int) -> str:
    """Return the text of an id from FIRST_WORD on: a space and two pairs of letters."""
    first, second = divmod(place - FIRST_WORD, len(PAIRS))
    return f" {PAIRS[first]}{PAIRS[second]}"


def tokenizer_json(demo: dict[str, Any]) -> dict[str, Any]:
    """Return the demo model's tokenizer.json with a vocabulary as large as the model's.

    Letters are merged into pairs, a space and a pair into the beginning of a word, and that and
    another pair into the word. A pair has a lower-case and an upper-case letter, so that nothing
    else in a word can be merged: any byte-pair tokenizer finds the same word in any merge order.
    """
    space = "Ġ"  # as byte-level tokenizers spell it
    starts = [space + pair for pair in PAIRS]
    words = [space + word(place)[1:] for place in range(FIRST_WORD, VOCABULARY)]
    special = [token["content"] for token in demo["added_tokens"]]
    vocabulary = [*special, *sorted(ByteLevel.alphabet()), *PAIRS, *starts, *words]
    merges = [[pair[0], pair[1]] for pair in PAIRS]
    merges += [[space, pair] for pair in PAIRS]
    merges += [[text[:3], text[3:]] for text in words]
    ids = {text: place for place, text in enumerate(vocabulary)}
    return demo | {"model": demo["model"] | {"vocab": ids, "merges": merges}}


def make_model(folder: Path, shape: str = DENSE) -> None:
    """Write the Hugging Face folder of a model of SHAPES unless it exists."""
    if (folder / "model.safetensors").exists():
        return
    import torch
    import transformers

    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    torch.manual_seed(SEED)
    name, sizes = SHAPES[shape]
    # The language model of a family that also has a multimodal class.
    build = getattr(transformers, f"{name}TextConfig", None)
    build = build or getattr(transformers, f"{name}Config")
    config_object = build(**COMMON, **sizes, dtype="bfloat16")
    model = getattr(transformers, f"{name}ForCausalLM")(config_object).bfloat16()
    model.save_pretrained(partial)
    # Older versions of transformers read rope_theta and torch_dtype from these keys.
    config = json.loads((partial / "config.json").read_text())
    config |= {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"}
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer = tokenizer_json(json.loads((DEMO / "tokenizer.json").read_text()))
    (partial / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokenizer_config = json.loads((DEMO / "tokenizer_config.json").read_text())
    tokenizer_config["model_max_length"] = CONTEXT
    (partial / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    partial.rename(folder)


if __name__ == "__main__":
    make_model(Path(sys.argv[1]), *sys.argv[2:])
