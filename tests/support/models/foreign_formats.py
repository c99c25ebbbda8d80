"""Families that transformers has in another format, or not at all.

Owns the way from a tiny checkpoint of transformers to the family's own names and keys, and a
reference of our own where there is no other. Tensors are rewritten with torch only.
"""

import json
import math
from pathlib import Path
from typing import Any

Config = dict[str, Any]
Tensors = dict[str, Any]


def to_chatglm(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """GLM-4 of transformers as ChatGLM writes it."""
    import torch

    renamed = {
        "model.embed_tokens.": "transformer.embedding.word_embeddings.",
        "model.layers.": "transformer.encoder.layers.",
        "model.norm.": "transformer.encoder.final_layernorm.",
        "lm_head.": "transformer.output_layer.",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }
    made: Tensors = {"transformer.rotary_pos_emb.inv_freq": torch.ones(2)}
    for name, tensor in tensors.items():
        if ".k_proj" in name or ".v_proj" in name:
            continue
        new = name
        for old, own in renamed.items():
            new = new.replace(old, own)
        if ".q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            new = new.replace("self_attn.q_proj", "self_attention.query_key_value")
            tensor = torch.cat(parts)
        made[new] = tensor.contiguous()
    own_config = {
        "architectures": ["ChatGLMModel"],
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "ffn_hidden_size": config["intermediate_size"],
        "fp32_residual_connection": False,
        "hidden_dropout": 0.0,
        "hidden_size": config["hidden_size"],
        "kv_channels": config["head_dim"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "num_attention_heads": config["num_attention_heads"],
        "num_layers": config["num_hidden_layers"],
        "original_rope": True,
        "padded_vocab_size": config["vocab_size"],
        "post_layer_norm": True,
        "rmsnorm": True,
        "seq_length": config["max_position_embeddings"],
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return own_config, made


def to_baichuan(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Llama of transformers as Baichuan's smaller size."""
    import torch

    made: Tensors = {}
    for name, tensor in tensors.items():
        if ".q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            made[name.replace("q_proj", "W_pack")] = torch.cat(parts)
        elif ".k_proj" not in name and ".v_proj" not in name:
            made[name] = tensor
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
    own_config = {key: config[key] for key in kept} | {
        "architectures": ["BaiChuanForCausalLM"],
        "model_type": "baichuan",
        "hidden_act": "silu",
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    return own_config, made


def baichuan13(heads: int = 6) -> Any:
    """Baichuan 2's larger size from its description: linear biases, a head of rows of length 1.

    Written plainly: full matrices, no cache. Press et al., "Train Short, Test Long" (2022), gives
    the slopes of 8 heads, and those of 6: those of 4, then every other one of 8.
    """
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    hidden, inner, layers, vocabulary = 8 * heads, 80, 4, 131
    slopes = [2.0**-k for k in range(1, 9)]
    if heads == 6:
        slopes = [2.0 ** (-2 * k) for k in (1, 2, 3, 4)] + [2.0**-1, 2.0**-3]

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_layernorm = nn.RMSNorm(hidden, eps=1e-6)
            self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-6)
            self.self_attn = nn.ModuleDict(
                {
                    "W_pack": nn.Linear(hidden, 3 * hidden, bias=False),
                    "o_proj": nn.Linear(hidden, hidden, bias=False),
                }
            )
            self.mlp = nn.ModuleDict(
                {
                    "gate_proj": nn.Linear(hidden, inner, bias=False),
                    "up_proj": nn.Linear(hidden, inner, bias=False),
                    "down_proj": nn.Linear(inner, hidden, bias=False),
                }
            )

        def forward(self, x: Tensor) -> Tensor:
            count = len(x)
            packed = self.self_attn["W_pack"](self.input_layernorm(x))
            q, k, v = packed.view(count, 3, heads, hidden // heads).permute(1, 2, 0, 3)
            position = torch.arange(count)
            bias = torch.tensor(slopes)[:, None, None] * (position - position[:, None])
            later = position > position[:, None]
            scores = q @ k.transpose(1, 2) / math.sqrt(hidden // heads) + bias
            shares = scores.masked_fill(later, -math.inf).softmax(-1).to(v.dtype)
            attended = shares @ v
            x = x + self.self_attn["o_proj"](attended.transpose(0, 1).reshape(count, hidden))
            y = self.post_attention_layernorm(x)
            gated = functional.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y)
            return x + self.mlp["down_proj"](gated)

    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Baichuan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers_in_order = [Layer() for _ in range(layers)]
            self.model = nn.ModuleDict(
                {
                    "embed_tokens": nn.Embedding(vocabulary, hidden),
                    "layers": nn.ModuleList(self.layers_in_order),
                    "norm": nn.RMSNorm(hidden, eps=1e-6),
                }
            )
            self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

        def forward(self, ids: Tensor) -> Output:
            x = self.model["embed_tokens"](ids[0])
            for layer in self.layers_in_order:
                x = layer(x)
            head = functional.normalize(self.lm_head.weight)
            return Output((self.model["norm"](x) @ head.T)[None])

        def save_pretrained(self, folder: Path, max_shard_size: str) -> None:
            from safetensors.torch import save_file

            folder.mkdir(parents=True, exist_ok=True)
            save_file(dict(self.state_dict()), folder / "model.safetensors")
            config = {
                "architectures": ["BaichuanForCausalLM"],
                "model_type": "baichuan",
                "hidden_act": "silu",
                "hidden_size": hidden,
                "intermediate_size": inner,
                "model_max_length": 256,
                "num_attention_heads": heads,
                "num_hidden_layers": layers,
                "rms_norm_eps": 1e-6,
                "tie_word_embeddings": False,
                "vocab_size": vocabulary,
                "eos_token_id": 2,
                "z_loss_weight": 0,
                "torch_dtype": "float32",
            }
            (folder / "config.json").write_text(json.dumps(config))

    return Baichuan()


def to_internlm3(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Llama with InternLM 3's configuration, as InternLM 3 was published."""
    return config | {"architectures": ["InternLM3ForCausalLM"]}, tensors


def to_mimo(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Qwen2 as MiMo, with a tensor of its multi-token prediction layers."""
    own_config = config | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    unread = {"model.mtp_layers.0.input_proj.weight": tensors["lm_head.weight"].clone()}
    return own_config, tensors | unread


def to_internlm2(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Llama of transformers as InternLM 2, whose first projection is stored KV head by KV head."""
    import torch

    renamed = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    kv_heads = config["num_key_value_heads"]
    made: Tensors = {}
    for name, tensor in tensors.items():
        if ".q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            grouped = [part.view(kv_heads, -1, part.shape[1]) for part in parts]
            own = name.replace("self_attn.q_proj", "attention.wqkv")
            made[own] = torch.cat(grouped, dim=1).flatten(0, 1)
        elif ".k_proj" not in name and ".v_proj" not in name:
            for old, new in renamed.items():
                name = name.replace(old, new)
            made[name] = tensor
    keys = {key: value for key, value in config.items() if key not in ("head_dim", "mlp_bias")}
    own_config = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}
    return keys | own_config | {"bias": False}, made


def to_minicpm(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Granite of transformers as MiniCPM, whose factors have other names."""
    factors = ("embedding", "residual", "attention")
    keys = {key: value for key, value in config.items() if key != "logits_scaling"}
    scale_emb, residual, _ = (keys.pop(f"{name}_multiplier") for name in factors)
    return keys | {
        "architectures": ["MiniCPMForCausalLM"],
        "model_type": "minicpm",
        "scale_emb": scale_emb,
        "scale_depth": residual * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": int(config["hidden_size"] / config["logits_scaling"]),
    }, tensors
