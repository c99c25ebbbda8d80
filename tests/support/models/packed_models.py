"""Tiny checkpoints in formats of few bits, and of the floats that their codes stand for.

The writers follow the formats' descriptions with loops over numpy arrays; nothing of gllm is used.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Array = np.ndarray[Any, Any]
Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, Array]
"""A layer's tensors by the last part of their names, and the floats [outputs, inputs] float32."""

SIZES = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
"""Families, by transformers' names, and their further sizes."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate((E2M1, -E2M1))


def stream(codes: Array, width: int) -> torch.Tensor:
    """Codes [n, count] as a stream of bits in int32 words, the lowest first."""
    count = codes.shape[1]
    words = np.zeros((len(codes), -(-count * width // 32) + 1), np.uint64)
    for index in range(count):
        word, shift = divmod(index * width, 32)
        shifted = codes[:, index].astype(np.uint64) << np.uint64(shift)
        words[:, word] |= shifted & np.uint64(0xFFFFFFFF)
        words[:, word + 1] |= shifted >> np.uint64(32)
    return torch.from_numpy(words[:, :-1].astype(np.uint32).view(np.int32).copy())


def awq_words(codes: Array) -> torch.Tensor:
    """Codes [inputs, outputs] as AWQ packs them, eight outputs per word."""
    words = np.zeros((len(codes), codes.shape[1] // 8), np.uint32)
    for word in range(words.shape[1]):
        for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, word] |= codes[:, 8 * word + output].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


@dataclass(frozen=True)
class Integers:
    """A weight as integers in groups: w[o, i] = scales[o, g] * (codes[o, i] - zeros[o, g])."""

    codes: Array
    scales: Array
    """[outputs, groups] float16."""
    zeros: Array
    groups: Array
    """[inputs]: the group g of each input."""

    @property
    def floats(self) -> Array:
        codes = self.codes.astype(np.float32) - self.zeros[:, self.groups].astype(np.float32)
        return self.scales[:, self.groups].astype(np.float32) * codes


def to_integers(
    weight: Array, width: int, group: int, symmetric: bool = False, act_order: bool = False
) -> Integers:
    """Round a weight; some groups have the zero 0 and others the largest code."""
    outputs, inputs = weight.shape
    group, top = inputs if group == -1 else group, (1 << width) - 1
    groups = np.arange(inputs) // group
    generator = np.random.default_rng(outputs * inputs + width)
    if act_order:
        groups = groups[generator.permutation(inputs)]
    count = groups.max() + 1
    zeros = np.full((outputs, count), 1 << (width - 1))
    if not symmetric:
        # Near the middle, so that codes reach both signs, and at both ends of the codes.
        zeros += generator.integers(-1, 2, zeros.shape)
        zeros[1::7, 0], zeros[2::7, 0] = 0, top
    scales = np.stack([np.abs(weight[:, groups == g]).max(1) for g in range(count)], 1)
    scales = (scales / (1 << (width - 1))).astype(np.float16)
    codes = np.rint(weight / scales[:, groups].astype(np.float32)) + zeros[:, groups]
    return Integers(np.clip(codes, 0, top).astype(np.int64), scales, zeros, groups)


def pack_awq(made: Integers) -> Tensors:
    return {
        "qweight": awq_words(made.codes.T),
        "qzeros": awq_words(made.zeros.T),
        "scales": torch.from_numpy(made.scales.T.copy()),
    }


def write_awq(weight: Array, group: int) -> Written:
    made = to_integers(weight, 4, group)
    return pack_awq(made), made.floats


def pack_gptq(made: Integers, width: int, offset: int = 1) -> Tensors:
    """offset: subtracted from stored zeros, within their bits."""
    return {
        "qweight": stream(made.codes, width).t().contiguous(),
        "qzeros": stream(made.zeros.T - offset & (1 << width) - 1, width),
        "scales": torch.from_numpy(made.scales.T.copy()),
        "g_idx": torch.from_numpy(made.groups.astype(np.int32)),
        # AutoGPTQ's, for layers without a bias.
        "bias": torch.zeros(len(made.codes)),
    }


def write_gptq(
    weight: Array,
    width: int,
    group: int,
    offset: int = 1,
    symmetric: bool = False,
    act_order: bool = False,
) -> Written:
    """offset: see pack_gptq."""
    made = to_integers(weight, width, group, symmetric, act_order)
    return pack_gptq(made, width, offset), made.floats


def write_compressed(
    weight: Array,
    width: int,
    group: int,
    symmetric: bool = True,
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Written:
    made = to_integers(weight, width, group, symmetric, act_order)
    scales = torch.from_numpy(made.scales).to(dtype)
    made = Integers(made.codes, scales.float().numpy(), made.zeros, made.groups)
    tensors = {
        "weight_packed": stream(made.codes, width),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = stream(made.zeros.T, width).t().contiguous()
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(made.groups.astype(np.int32))
    return tensors, made.floats


def write_int8(weight: Array) -> Written:
    scales = (np.abs(weight).max(1, keepdims=True) / 127).astype(np.float32)
    codes = np.rint(weight / scales).astype(np.int8)
    tensors = {"weight": torch.from_numpy(codes), "weight_scale": torch.from_numpy(scales)}
    return tensors, codes.astype(np.float32) * scales


def write_fp4(weight: Array, group: int, is_nvidia: bool) -> Written:
    outputs, inputs = weight.shape
    blocks = weight.reshape(outputs, -1, group)
    most = np.abs(blocks).max(2)
    if is_nvidia:
        divisor = np.float32(448 * 6 / most.max())
        stored = torch.from_numpy(most / 6 * divisor).to(torch.float8_e4m3fn)
        scales = stored.float().numpy() / divisor
        more = {"weight_global_scale": torch.tensor([divisor])}
        more["input_global_scale"] = torch.ones(1)
    else:
        exponents = np.ceil(np.log2(most / 6)).astype(np.int64)
        stored, more = torch.from_numpy((exponents + 127).astype(np.uint8)), {}
        scales = np.exp2(exponents).astype(np.float32)
    distances = np.abs((blocks / scales[:, :, None])[..., None] - E2M1)
    codes = distances.argmin(3)
    floats = E2M1[codes] * scales[:, :, None]
    codes = codes.reshape(outputs, inputs).astype(np.uint8)
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    return {"weight_packed": packed, "weight_scale": stored, **more}, floats.reshape(weight.shape)


def gptq_config(bits: int = 4, group_size: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "damp_percent": 0.01,
        "desc_act": False,
        "sym": False,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": "model",
        **more,
    }


def awq_config(group_size: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": ["visual"],
        **more,
    }


def round_config(packing: str, group_size: int = 32) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": group_size,
        "sym": False,
        "data_type": "int",
        "packing_format": packing,
        "iters": 200,
        "autoround_version": "0.15.1",
        "enable_quanted_input": False,
        "static_attention_granularity": "tensor",
        "static_kv_granularity": "tensor",
        "block_name_to_quantize": "model.layers",
        "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
    }


def compressed_config(
    stored: str, num_bits: int, group_size: int | None, kind: str = "int", **more: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": num_bits,
        "type": kind,
        "symmetric": True,
        "strategy": "channel" if group_size is None else "group",
        "group_size": group_size,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
        **more,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


PACKED = "pack-quantized"
STYLES: dict[str, tuple[dict[str, Any], Callable[[Array], Written]]] = {
    "awq": (awq_config(), lambda w: write_awq(w, 32)),
    "awq 128": (awq_config(128, version="GEMM"), lambda w: write_awq(w, 128)),
    "awq -1": (awq_config(-1), lambda w: write_awq(w, -1)),
    "gptq": (gptq_config(), lambda w: write_gptq(w, 4, 32)),
    "gptq 64 act-order": (
        gptq_config(4, 64, desc_act=True),
        lambda w: write_gptq(w, 4, 64, act_order=True),
    ),
    "gptq -1": (gptq_config(4, -1, desc_act=True), lambda w: write_gptq(w, 4, -1)),
    "gptq symmetric": (gptq_config(sym=True), lambda w: write_gptq(w, 4, 32, symmetric=True)),
    "gptq 8 bits": (gptq_config(8), lambda w: write_gptq(w, 8, 32)),
    "gptq 3 bits": (gptq_config(3), lambda w: write_gptq(w, 3, 32)),
    "gptq 2 bits": (gptq_config(2), lambda w: write_gptq(w, 2, 32)),
    "gptq v2": (
        gptq_config(checkpoint_format="gptq_v2", pack_dtype="int32", meta={"quantizer": []}),
        lambda w: write_gptq(w, 4, 32, offset=0),
    ),
    "autoround gptq": (round_config("auto_round:auto_gptq"), lambda w: write_gptq(w, 4, 32)),
    "autoround awq": (round_config("auto_round:auto_awq"), lambda w: write_awq(w, 32)),
    "compressed": (compressed_config(PACKED, 4, 32), lambda w: write_compressed(w, 4, 32)),
    "compressed channel": (
        compressed_config(PACKED, 4, None, symmetric=False),
        lambda w: write_compressed(w, 4, -1, symmetric=False),
    ),
    "compressed bfloat16": (
        compressed_config(PACKED, 4, 64, symmetric=False),
        lambda w: write_compressed(w, 4, 64, symmetric=False, dtype=torch.bfloat16),
    ),
    "compressed act-order": (
        compressed_config(PACKED, 8, 32, actorder="group"),
        lambda w: write_compressed(w, 8, 32, act_order=True),
    ),
    "int8": (compressed_config("int-quantized", 8, None), write_int8),
    "mxfp4": (
        compressed_config("mxfp4-pack-quantized", 4, 32, "float"),
        lambda w: write_fp4(w, 32, is_nvidia=False),
    ),
    "nvfp4": (
        compressed_config("nvfp4-pack-quantized", 4, 16, "float", strategy="tensor_group"),
        lambda w: write_fp4(w, 16, is_nvidia=True),
    ),
}
"""quantization_config and the writer of a weight."""


def save_both(family: str, style: str, root: Path, **sizes: Any) -> tuple[Path, Path]:
    """A checkpoint of a style, and one of the floats that it stands for.

    sizes: replace those of the family.
    """
    config, write = STYLES[style]
    plain, made = root / "plain", root / "packed"
    content = _write_config(family, plain, **sizes)
    _write_config(family, made, **sizes)
    stored, floats = dict(content), dict(content)
    for name, weight in content.items():
        if not name.endswith("_proj.weight"):
            continue
        tensors, dequantized = write(weight.numpy())
        stem = name.removesuffix("weight")
        del stored[name]
        stored |= {stem + end: tensor for end, tensor in tensors.items()}
        floats[name] = torch.from_numpy(dequantized)
    save_file(stored, made / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    change_config(made, quantization_config=config)
    return made, plain


def save_gpt_oss(root: Path) -> tuple[Path, Path]:
    """A checkpoint of gpt-oss with MXFP4 experts as published, and one of the floats in them."""
    folders = root / "packed", root / "plain"
    contents: list[Tensors] = [{}, {}]
    model = _random_model("GptOss", ())
    for name, parameter in model.named_parameters():
        weight = parameter.detach().to(torch.bfloat16).contiguous()
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            contents[0][name] = contents[1][name] = weight
            continue
        written = [write_fp4(matrix.t().float().numpy(), 32, False) for matrix in weight]
        blocks = torch.stack([tensors["weight_packed"] for tensors, _ in written])
        contents[0][f"{name}_blocks"] = blocks.unflatten(-1, (-1, 16))
        contents[0][f"{name}_scales"] = torch.stack([part["weight_scale"] for part, _ in written])
        floats = torch.stack([torch.from_numpy(matrix).t() for _, matrix in written])
        contents[1][name] = floats.to(torch.bfloat16).contiguous()
    model.config.architectures = [type(model).__name__]
    for folder, content in zip(folders, contents, strict=True):
        folder.mkdir()
        model.config.save_pretrained(folder)
        save_file(content, folder / "model.safetensors", {"format": "pt"})
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    change_config(
        folders[0], quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": modules}
    )
    return folders


def _write_config(family: str, folder: Path, **sizes: Any) -> Tensors:
    """Write config.json of a random model; its weights."""
    model = _random_model(family, tuple(sizes.items()))
    folder.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return {name: weight.detach().contiguous() for name, weight in _stored(model).items()}


@cache
def _random_model(family: str, sizes: tuple[tuple[str, Any], ...]) -> Any:
    import transformers

    torch.manual_seed(3)
    options = SIZES | MODELS[family] | dict(sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**options)
    )
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def _stored(model: Any) -> Tensors:
    """The weights by the names of checkpoints, where each expert has its own."""
    content = {}
    for name, weight in model.named_parameters():  # a tied one once
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            content[name] = weight
            continue
        folder, _, stack = name.rpartition(".")
        for expert, whole in enumerate(weight):
            parts = whole.chunk(2) if stack == "gate_up_proj" else [whole]
            names = ["gate_proj", "up_proj"] if stack == "gate_up_proj" else ["down_proj"]
            for part, each in zip(parts, names, strict=True):
                content[f"{folder}.{expert}.{each}.weight"] = part
    return content


def write_config(folder: Path, quantization: dict[str, Any]) -> Path:
    """Write config.json of a model with weights of a format; the folder."""
    _write_config("Llama", folder / "model")
    change_config(folder / "model", quantization_config=quantization)
    return folder / "model"


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
