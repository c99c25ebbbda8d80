"""Models that transformers does not have, written out plainly: full matrices, no cache.

Owns Qwen's first release and DeepSeek's first mixture of experts, each from its description, with
tiny sizes and names of tensors as published.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEADS, HEAD_DIM, NUM_LAYERS, VOCABULARY = 48, 8, 6, 4, 131
COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


class Output(NamedTuple):
    """As transformers' models return them."""

    logits: Tensor


class WrittenModel(nn.Module):
    """A model that is saved with its configuration."""

    raw: dict[str, Any]

    def save_pretrained(self, folder: Path, max_shard_size: str) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(self.state_dict()), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.raw))


def rotated(x: Tensor) -> Tensor:
    """x [heads, tokens, elements] turned: Su et al., "RoFormer" (2021), element i with i + half."""
    count, size = x.shape[1:]
    frequencies = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(count)[:, None] * frequencies
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of rows of heads, with rotary positions: [tokens, hidden].

    Keys and values may have fewer heads, each for as many queries' heads in a row.
    """
    count = len(q)
    q, k, v = (each.view(count, -1, HEAD_DIM).transpose(0, 1) for each in (q, k, v))
    k, v = (each.repeat_interleave(HEADS // len(each), dim=0) for each in (k, v))
    scores = rotated(q) @ rotated(k).transpose(1, 2) / math.sqrt(HEAD_DIM)
    later = torch.ones(count, count, dtype=torch.bool).triu(1)
    values = scores.masked_fill(later, -math.inf).softmax(-1).to(v.dtype) @ v
    return values.transpose(0, 1).reshape(count, HIDDEN)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class QwenLayer(nn.Module):
    """Bai et al., "Qwen Technical Report" (2023), section 2.3: w2 is the gate, w1 what it gates."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.RMSNorm(HIDDEN, eps=1e-6), nn.RMSNorm(HIDDEN, eps=1e-6)
        self.attn = nn.ModuleDict(
            {"c_attn": linear(HIDDEN, 3 * HIDDEN, True), "c_proj": linear(HIDDEN, HIDDEN)}
        )
        self.mlp = nn.ModuleDict(
            {
                "w1": linear(HIDDEN, inner),
                "w2": linear(HIDDEN, inner),
                "c_proj": linear(inner, HIDDEN),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn["c_proj"](attended(*self.attn["c_attn"](self.ln_1(x)).chunk(3, dim=-1)))
        y = self.ln_2(x)
        return x + self.mlp["c_proj"](self.mlp["w1"](y) * functional.silu(self.mlp["w2"](y)))


class Qwen1(WrittenModel):
    """Up to seq_length tokens, where log-n attention and dynamic NTK change nothing."""

    raw = COMMON | {
        "architectures": ["QWenLMHeadModel"],
        "model_type": "qwen",
        "attn_dropout_prob": 0.0,
        "bf16": False,
        "emb_dropout_prob": 0.0,
        "fp16": False,
        "fp32": False,
        "initializer_range": 0.02,
        "intermediate_size": 160,
        "kv_channels": HEAD_DIM,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 1024,
        "no_bias": True,
        "onnx_safe": None,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": 256,
        "softmax_in_fp32": False,
        "tokenizer_class": "QWenTokenizer",
        "use_cache": True,
        "use_cache_kernel": False,
        "use_cache_quantization": False,
        "use_dynamic_ntk": True,
        "use_flash_attn": "auto",
        "use_logn_attn": True,
    }

    def __init__(self) -> None:
        super().__init__()
        inner = self.raw["intermediate_size"] // 2
        self.in_order = [QwenLayer(inner) for _ in range(NUM_LAYERS)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, HIDDEN),
                "h": nn.ModuleList(self.in_order),
                "ln_f": nn.RMSNorm(HIDDEN, eps=1e-6),
            }
        )
        self.lm_head = linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Output:
        x = self.transformer["wte"](ids[0])
        for layer in self.in_order:
            x = layer(x)
        return Output(self.lm_head(self.transformer["ln_f"](x))[None])


class GatedBlock(nn.Module):
    """Shazeer, "GLU Variants Improve Transformer" (2020), equation 6: SwiGLU."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, inner), linear(HIDDEN, inner)
        self.down_proj = linear(inner, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DeepseekExperts(nn.Module):
    """Dai et al., "DeepSeekMoE" (2024), equations 9 to 11, token by token.

    The shared experts are stored as one block of their sizes together, which is their sum.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__()
        inner, self.top_k = raw["moe_intermediate_size"], raw["num_experts_per_tok"]
        self.in_order = [GatedBlock(inner) for _ in range(raw["n_routed_experts"])]
        self.experts = nn.ModuleList(self.in_order)
        self.gate = linear(HIDDEN, raw["n_routed_experts"])
        self.shared_experts = GatedBlock(raw["n_shared_experts"] * inner)

    def forward(self, x: Tensor) -> Tensor:
        affinities = self.gate(x).softmax(-1)
        rows = []
        for token, row in zip(x, affinities, strict=True):
            scores, chosen = row.topk(self.top_k)
            outputs = [self.in_order[int(expert)](token) for expert in chosen]
            rows.append(sum(s * y for s, y in zip(scores, outputs, strict=True)))
        return torch.stack(rows) + self.shared_experts(x)


class DeepseekLayer(nn.Module):
    def __init__(self, raw: dict[str, Any], is_dense: bool) -> None:
        super().__init__()
        few = raw["num_key_value_heads"] * HEAD_DIM
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(HIDDEN, HIDDEN),
                "k_proj": linear(HIDDEN, few),
                "v_proj": linear(HIDDEN, few),
                "o_proj": linear(HIDDEN, HIDDEN),
            }
        )
        self.mlp = GatedBlock(raw["intermediate_size"]) if is_dense else DeepseekExperts(raw)

    def forward(self, x: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        parts = (self.self_attn[f"{name}_proj"](y) for name in "qkv")
        x = x + self.self_attn["o_proj"](attended(*parts))
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekV1(WrittenModel):
    """The first layer is dense; the published model has as many heads of keys as of queries."""

    raw = COMMON | {
        "architectures": ["DeepseekForCausalLM"],
        "model_type": "deepseek",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "intermediate_size": 80,
        "moe_intermediate_size": 32,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000,
        "scoring_func": "softmax",
        "seq_aux": True,
        "use_cache": True,
    }

    def __init__(self) -> None:
        super().__init__()
        self.in_order = [DeepseekLayer(self.raw, layer < 1) for layer in range(NUM_LAYERS)]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCABULARY, HIDDEN),
                "layers": nn.ModuleList(self.in_order),
                "norm": nn.RMSNorm(HIDDEN, eps=1e-6),
            }
        )
        self.lm_head = linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Output:
        x = self.model["embed_tokens"](ids[0])
        for layer in self.in_order:
            x = layer(x)
        return Output(self.lm_head(self.model["norm"](x))[None])
