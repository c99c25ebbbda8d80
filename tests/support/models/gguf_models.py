"""GGUF files of tiny checkpoints, written as llama.cpp's converter writes them.

Names are those of the gguf package's tensor name map; the orders of rows are written here anew,
from the checkpoint to the file.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "Glm4ForCausalLM": "glm4",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "FalconForCausalLM": "falcon",
    "BloomForCausalLM": "bloom",
    "GptOssForCausalLM": "gpt-oss",
    "GPT2LMHeadModel": "gpt2",
    "BaiChuanForCausalLM": "baichuan",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "ArceeForCausalLM": "arcee",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "Glm4MoeForCausalLM": "glm4moe",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "Lfm2ForCausalLM": "lfm2",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "OlmoeForCausalLM": "olmoe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""Architectures of config.json, and llama.cpp's names of them."""
LIKE_LLAMA = ("arcee", "deepseek", "granite", "granitemoe", "llama", "smollm3")
"""Architectures whose queries and keys have interleaved rotary halves in the file."""


def to_gguf(folder: Path, out: Path, kind: str = "F32", num_files: int = 1) -> Path:
    """Write a checkpoint's configuration and its weights in GGUF to a folder; the folder.

    Matrices whose rows have no whole blocks of the type stay floats, as llama.cpp keeps them.
    """
    raw = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[raw["architectures"][0]]
    tensors = _converted(raw, architecture, load_file(folder / "model.safetensors"))
    out.mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", out)
    names = sorted(tensors)
    for index in range(num_files):
        name = "model.gguf"
        if num_files > 1:
            name = f"model-{index + 1:05d}-of-{num_files:05d}.gguf"
        writer = gguf.GGUFWriter(out / name, architecture)
        if num_files > 1:
            writer.add_uint16("split.no", index)
            writer.add_uint16("split.count", num_files)
        for tensor_name in names[index::num_files]:
            _add(writer, tensor_name, tensors[tensor_name], gguf.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return out


def _add(
    writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: gguf.GGMLQuantizationType
) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    is_matrix = tensor.dim() > 1 and "norm" not in name and "ffn_gate_inp" not in name
    is_matrix = is_matrix and not name.endswith(".bias")
    if not is_matrix or tensor.shape[-1] % block:
        kind = gguf.GGMLQuantizationType.F32
    data = gguf.quants.quantize(np.ascontiguousarray(tensor.float().numpy()), kind)
    writer.add_tensor(name, data, raw_dtype=kind)


def _converted(
    raw: dict[str, Any], architecture: str, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors by their names in the file, in its order of rows."""
    layers = int(raw["num_hidden_layers"] if "num_hidden_layers" in raw else raw["n_layer"])
    (number,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, layers)
    # llama.cpp has no dense layers beside experts in some families: they have Llama's names.
    others = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    found: dict[str, Tensor] = {}
    for name, tensor in _split(raw, architecture, _stack_experts(tensors)).items():
        # transformers writes the body of some families without its prefix.
        form = name.replace("e_score_correction_bias", "e_score_correction.bias")
        candidates = (
            table.get_name(text, (".weight", ".bias"))
            for table in (names, others)
            for text in (form.removeprefix("transformer."), form)
        )
        stored = next((candidate for candidate in candidates if candidate is not None), None)
        assert stored is not None, f"llama.cpp has no name for {name}"
        found[stored] = tensor
    return found


def _stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with those of all experts of a layer as one."""
    stacked: dict[str, dict[int, Tensor]] = {}
    others = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".experts.")
        index, _, kind = after.partition(".")
        if not found or not index.isdigit():
            others[name] = tensor
            continue
        # Mixtral's experts have the name that its first files had.
        block = before.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        block = block if "feed_forward" in block else before
        stacked.setdefault(f"{block}.experts.{kind}", {})[int(index)] = tensor
    return others | {
        name: torch.stack([parts[index] for index in range(len(parts))])
        for name, parts in stacked.items()
    }


def _split(raw: dict[str, Any], architecture: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as the file has them, by names that the name map knows."""
    heads = int(raw["num_attention_heads"] if "num_attention_heads" in raw else raw["n_head"])
    kv_heads = int(raw.get("num_key_value_heads", heads))
    if architecture == "falcon":
        kv_heads = raw["num_kv_heads"] if raw["new_decoder_architecture"] else 1
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if architecture in LIKE_LLAMA and ".q_proj." in name:
            result[name] = interleave(tensor, heads)
        elif architecture in LIKE_LLAMA and ".k_proj." in name:
            result[name] = interleave(tensor, kv_heads)
        elif architecture == "baichuan" and "W_pack" in name:
            query, key, value = tensor.chunk(3)
            prefix = name.replace("W_pack.weight", "")
            result |= {
                f"{prefix}q_proj.weight": interleave(query, heads),
                f"{prefix}k_proj.weight": interleave(key, heads),
                f"{prefix}v_proj.weight": value,
            }
        elif architecture.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
            result[name] = tensor.float() + 1
        elif architecture in ("falcon", "bloom") and "query_key_value" in name:
            result[name] = by_projection(tensor, heads, kv_heads)
        elif architecture == "gpt2" and re.search(r"\.c_(attn|proj|fc)\.weight", name):
            result[name] = tensor.t()
        elif architecture == "granitemoe" and ".input_linear." in name:
            layer, _, block = name.partition("block_sparse_moe.")
            stem = f"{layer}mlp.experts"
            if not block:
                stem = name.replace("shared_mlp.input_linear.weight", "mlp.shared_expert")
            gate, up = tensor.chunk(2, dim=-2)
            result |= {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
        elif architecture == "lfm2" and name.endswith("conv.conv.weight"):
            result[name] = tensor[:, 0]
        elif architecture == "gpt-oss" and name.endswith(".sinks"):
            result[f"{name}.weight"] = tensor
        elif architecture == "gpt-oss" and ".mlp.experts." in name:
            result |= split_gpt_oss(name, tensor)
        elif architecture == "deepseek2" and ".kv_b_proj." in name:
            result |= split_latent(name, tensor, heads, raw["qk_nope_head_dim"])
        else:
            result[name] = tensor
    return result


def interleave(tensor: Tensor, heads: int) -> Tensor:
    """Return the outputs of each head with its two halves interleaved."""
    halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def by_projection(tensor: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Return the outputs of a fused projection, stored KV head by KV head, by projection."""
    groups = tensor.reshape(kv_heads, heads // kv_heads + 2, -1, *tensor.shape[1:])
    parts = groups[:, :-2], groups[:, -2], groups[:, -1]
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def split_gpt_oss(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the experts' stacks with outputs before inputs, gate and up projection apart."""
    kind = "bias" if name.endswith("_bias") else "weight"
    stem = name.removesuffix("_bias")
    tensor = tensor if kind == "bias" else tensor.transpose(1, 2)
    if not stem.endswith("gate_up_proj"):
        return {f"{stem}.{kind}": tensor}
    parts = {"gate_proj": tensor[:, ::2], "up_proj": tensor[:, 1::2]}
    return {f"{stem.replace('gate_up_proj', part)}.{kind}": rows for part, rows in parts.items()}


def split_latent(name: str, tensor: Tensor, heads: int, nope_head_dim: int) -> dict[str, Tensor]:
    """Return the up projections of keys, by their inputs, and of values."""
    by_head = tensor.view(heads, -1, tensor.shape[1])
    return {
        name.replace("kv_b_proj", "k_b_proj"): by_head[:, :nope_head_dim].transpose(1, 2),
        name.replace("kv_b_proj", "v_b_proj"): by_head[:, nope_head_dim:],
    }
