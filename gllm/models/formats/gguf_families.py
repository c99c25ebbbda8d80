"""Architectures of GGUF files: one row each that translates its metadata to config.json.

Source: ggml's docs/gguf.md for the keys; the configurations published with the models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from gllm.models.formats.gguf_header import EMBEDDING, GgufHeader
from gllm.models.formats.gguf_rope import Config, read_gguf_rope


def _nothing(model: GgufHeader) -> Config:
    return {}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """Translation of one architecture's metadata to config.json."""

    architecture: str
    """Entry of `architectures`, a key of gllm.models.registry."""
    model_type: str
    integers: Mapping[str, str]
    """Keys of the file to names of config.json; an optional key ends with a question mark."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Same, for numbers that are no integers."""
    complete: Callable[[GgufHeader], Config] = _nothing
    """Returns the entries that are not copied."""


def _attention(model: GgufHeader, partial: bool = False) -> Config:
    """Return what most families read: heads, the rotary embedding, biases and the LM head.

    partial: the rotary embedding may turn a part of each head.
    """
    head_dim, heads = model.head_dim, model.integer("attention.head_count")
    if model.integer("attention.value_length", head_dim) != head_dim:
        raise model.metadata.error(model.key("attention.value_length"), f"{head_dim}, as keys")
    turned = model.integer("rope.dimension_count", head_dim)
    if turned != head_dim and not partial:
        raise model.metadata.error(model.key("rope.dimension_count"), f"{head_dim}, as head_dim")
    return {
        "head_dim": head_dim,
        "num_key_value_heads": model.integer("attention.head_count_kv", heads),
        **read_gguf_rope(model),
        **({"partial_rotary_factor": turned / head_dim} if partial else {}),
        **_tied(model),
    }


def _tied(model: GgufHeader) -> Config:
    """Return whether the LM head is the embedding: files of such models have no tensor for it."""
    return {"tie_word_embeddings": not model.has_tensor("output.weight")}


def _biased(model: GgufHeader, partial: bool = False) -> Config:
    """Return `attention_bias` beside what `_attention` returns."""
    return _attention(model, partial) | {"attention_bias": _has_bias(model, "attn_q")}


def _has_bias(model: GgufHeader, name: str) -> bool:
    """Return whether a linear layer has a bias; name: of its tensor in a layer."""
    return model.has_tensor(f"blk.0.{name}.bias")


def _with_mlp_bias(model: GgufHeader, partial: bool = False) -> Config:
    """Return `mlp_bias` beside what `_biased` returns."""
    return _biased(model, partial) | {"mlp_bias": _has_bias(model, "ffn_up")}


def _windows(model: GgufHeader, pattern: int, default: int | None) -> Config:
    """Return the sliding window, and which layers have it.

    Args:
        model: the file.
        pattern: every so manieth layer has full attention unless the file says otherwise.
        default: window in tokens of files without the key; None for no window.
    """
    window, count = model.integer("attention.sliding_window", default or 0), None
    layers, key = model.num_layers, model.key("attention.sliding_window_pattern")
    flags = model.metadata.get(key)
    if not isinstance(flags, list):
        count = model.metadata.integer(key, pattern)
        flags = [count == 0 or (layer + 1) % count != 0 for layer in range(layers)]
    if len(flags) != layers:
        raise model.metadata.error(key, f"a list of {layers}")
    names = ["sliding_attention" if flag and window else "full_attention" for flag in flags]
    return {"sliding_window": window or None, "layer_types": names}


def _llama(model: GgufHeader) -> Config:
    """Return the further entries of Llama, or of Mixtral if the file has experts."""
    if not model.integer("expert_count", 0):
        return _with_mlp_bias(model)
    return _attention(model) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": model.integer("expert_count"),
        "num_experts_per_tok": model.integer("expert_used_count"),
    }


def _qwen2_moe(model: GgufHeader) -> Config:
    inner = model.integer("feed_forward_length")
    return _attention(model) | {
        "moe_intermediate_size": model.integer(
            "expert_feed_forward_length", inner // max(1, model.integer("expert_used_count"))
        ),
        "shared_expert_intermediate_size": model.integer(
            "expert_shared_feed_forward_length", inner
        ),
        "norm_topk_prob": False,
    }


def _qwen3_moe(model: GgufHeader) -> Config:
    return _biased(model) | {"norm_topk_prob": True}


def _gpt_oss(model: GgufHeader) -> Config:
    config = _biased(model) | _windows(model, pattern=2, default=None)
    size = model.integer("feed_forward_length")
    config["intermediate_size"] = model.integer("expert_feed_forward_length", size)
    # Files do not say that YaRN's borders between the frequencies are not rounded.
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False
    return config


def _gemma2(model: GgufHeader) -> Config:
    # The largest size divides scores by the mean size of a head of the residual stream.
    return _gemma(model, largest=46) | _windows(model, pattern=2, default=4096)


def _gemma3(model: GgufHeader) -> Config:
    return (
        _gemma(model, largest=62)
        | _windows(model, pattern=6, default=None)
        | {"rope_local_base_freq": model.number("rope.freq_base_swa", 10_000.0)}
    )


def _gemma(model: GgufHeader, largest: int) -> Config:
    """Return the entries of Gemma 2 and 3; `largest`: layers of the largest size."""
    mean = model.integer("embedding_length") // model.integer("attention.head_count")
    scalar = mean if model.integer("block_count") == largest else model.head_dim
    return _attention(model) | {"query_pre_attn_scalar": scalar}


def _phi3(model: GgufHeader) -> Config:
    original = model.integer("rope.scaling.original_context_length", 4096)
    return _attention(model, partial=True) | {
        "original_max_position_embeddings": original,
        "sliding_window": model.integer("attention.sliding_window", 0) or None,
    }


def _glm(model: GgufHeader) -> Config:
    return _biased(model, partial=True)


def _chatglm(model: GgufHeader) -> Config:
    """Return the entries of ChatGLM's format, which fuses projections, or of Hugging Face's."""
    if not model.has_tensor("blk.0.attn_qkv.weight"):
        return _glm(model) | {
            "architectures": ["GlmForCausalLM"],
            "model_type": "glm",
            "intermediate_size": model.integer("feed_forward_length"),
            "max_position_embeddings": model.integer("context_length"),
            "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        }
    head_dim, turned = model.head_dim, model.integer("rope.dimension_count", 0)
    if 2 * turned != head_dim:
        raise model.metadata.error(model.key("rope.dimension_count"), f"half of {head_dim}")
    return {
        "add_bias_linear": False,
        "add_qkv_bias": model.has_tensor("blk.0.attn_qkv.bias"),
        "ffn_hidden_size": model.integer("feed_forward_length"),
        "kv_channels": head_dim,
        "layernorm_epsilon": model.number("attention.layer_norm_rms_epsilon"),
        "multi_query_attention": True,
        "multi_query_group_num": model.integer("attention.head_count_kv"),
        "num_layers": model.integer("block_count"),
        "padded_vocab_size": model.tensors[EMBEDDING][1].shape[0],
        "rope_ratio": model.number("rope.freq_base", 10_000.0) / 10_000.0,
        "seq_length": model.integer("context_length"),
    }


EXPERT_GROUPS = {160: (8, 3), 256: (8, 4)}
"""Groups of experts and groups selected, by the number of experts of DeepSeek V2 and V3: early
files of these models lack the keys."""


def _deepseek(model: GgufHeader) -> Config:
    if _gating(model) == "sigmoid":
        raise model.metadata.error(model.key("expert_gating_func"), "1, softmax")
    return _attention(model) | _deepseek_experts(model) | {"norm_topk_prob": False}


def _gating(model: GgufHeader) -> str:
    """Return how scores of experts are computed; of files without the key by their tensors."""
    has_correction = any(name.endswith(".exp_probs_b.bias") for name in model.tensors)
    number = model.integer("expert_gating_func", 2 if has_correction else 1)
    if number not in (1, 2):
        raise model.metadata.error(model.key("expert_gating_func"), "1 or 2")
    return "sigmoid" if number == 2 else "softmax"


def _deepseek_experts(model: GgufHeader) -> Config:
    return {
        "first_k_dense_replace": model.integer("leading_dense_block_count", 0),
        "moe_intermediate_size": model.integer("expert_feed_forward_length"),
        "n_routed_experts": model.integer("expert_count"),
        "n_shared_experts": model.integer("expert_shared_count", 0),
        "num_experts_per_tok": model.integer("expert_used_count"),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
    }


def _deepseek2(model: GgufHeader) -> Config:
    """Return the entries of DeepSeek V2, or of V3 if experts are selected by a sigmoid."""
    turned = model.integer("rope.dimension_count")
    # Files for attention in the latent space state its sizes as those of keys and values.
    key = model.integer("attention.key_length_mla", model.integer("attention.key_length"))
    value = model.integer("attention.value_length_mla", model.integer("attention.value_length"))
    # One in the latent space.
    model.integer("attention.head_count_kv", 1)
    experts = _deepseek_experts(model)
    groups, selected = EXPERT_GROUPS.get(experts["n_routed_experts"], (1, 1))
    groups = model.integer("expert_group_count", groups)
    selected = model.integer("expert_group_used_count", selected)
    config = {
        "kv_lora_rank": model.integer("attention.kv_lora_rank"),
        "q_lora_rank": model.integer("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": key - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": value,
        "n_group": groups,
        "topk_group": selected,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "norm_topk_prob": model.metadata.boolean(model.key("expert_weights_norm"), False),
        **experts,
        **read_gguf_rope(model),
        **_tied(model),
    }
    if _gating(model) == "softmax":
        return config
    return config | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def _olmo2(model: GgufHeader) -> Config:
    """Return the entries of OLMo 2, or of OLMo 3 if the file has windows."""
    config = _attention(model)
    if not model.has("attention.sliding_window"):
        return config
    if model.number("rope.freq_base_swa", config["rope_theta"]) != config["rope_theta"]:
        raise model.metadata.error(model.key("rope.freq_base_swa"), "equal to rope.freq_base")
    names = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return config | _windows(model, pattern=4, default=None) | names


def _exaone4(model: GgufHeader) -> Config:
    return _attention(model) | _windows(model, pattern=4, default=None)


def _granite_moe(model: GgufHeader) -> Config:
    """Return the entries of Granite with experts, also with a shared one."""
    model.integer("expert_feed_forward_length", 0)
    size = model.integer("expert_shared_feed_forward_length", 0)
    if not size:
        return _biased(model)
    return _biased(model) | {
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "model_type": "granitemoeshared",
        "shared_intermediate_size": size,
    }


def _seed_oss(model: GgufHeader) -> Config:
    return _with_mlp_bias(model) | {"attention_out_bias": _has_bias(model, "attn_output")}


def _use_bias(model: GgufHeader) -> Config:
    """Return the entries of families with one switch for all biases."""
    return _attention(model) | {"use_bias": _has_bias(model, "attn_q")}


def _nemotron(model: GgufHeader) -> Config:
    # The converter writes it beside the epsilon of the LayerNorms that the model has.
    model.number("attention.layer_norm_rms_epsilon", 0.0)
    return _with_mlp_bias(model, partial=True)


def _olmoe(model: GgufHeader) -> Config:
    return _attention(model) | {"norm_topk_prob": False}


def _glm4_moe(model: GgufHeader) -> Config:
    """Return the entries of GLM-4.5; its files count layers of multi-token prediction."""
    if _gating(model) != "sigmoid":
        raise model.metadata.error(model.key("expert_gating_func"), "2, sigmoid")
    further = model.integer("nextn_predict_layers", 0)
    return {
        **_biased(model, partial=True),
        **_deepseek_experts(model),
        "num_hidden_layers": model.num_layers - further,
        "num_nextn_predict_layers": further,
        "n_group": model.integer("expert_group_count", 1),
        "topk_group": model.integer("expert_group_used_count", 1),
        "norm_topk_prob": model.metadata.boolean(model.key("expert_weights_norm"), True),
        "use_qk_norm": model.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _minimax_m2(model: GgufHeader) -> Config:
    if _gating(model) != "sigmoid":
        raise model.metadata.error(model.key("expert_gating_func"), "2, sigmoid")
    config, size = _attention(model, partial=True), model.integer("feed_forward_length")
    config.pop("partial_rotary_factor")
    return config | {
        "intermediate_size": model.integer("expert_feed_forward_length", size),
        "rotary_dim": model.integer("rope.dimension_count", model.head_dim),
        "scoring_func": "sigmoid",
    }


def _lfm2(model: GgufHeader) -> Config:
    """Return the entries of LFM2: layers without KV heads have a convolution."""
    key = model.key("attention.head_count_kv")
    counts = model.metadata.get(key)
    layers = model.num_layers
    if not isinstance(counts, list) or len(counts) != layers or len({*counts} - {0}) != 1:
        raise model.metadata.error(key, f"a list of {layers}, equal numbers or 0")
    return {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": model.integer("shortconv.l_cache"),
        "conv_bias": False,
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "num_key_value_heads": max(counts),
        **read_gguf_rope(model),
        **_tied(model),
    }


def _command_r(model: GgufHeader) -> Config:
    return _biased(model) | {"use_qk_norm": model.has_tensor("blk.0.attn_q_norm.weight")}


def _cohere2(model: GgufHeader) -> Config:
    return _biased(model) | _windows(model, pattern=4, default=4096)


def _falcon(model: GgufHeader) -> Config:
    kv_heads = model.integer("attention.head_count_kv", 1)
    has_two_norms = model.has_tensor("blk.0.attn_norm_2.weight")
    return {
        "bias": model.has_tensor("blk.0.attn_qkv.bias"),
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": kv_heads > 1,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        **read_gguf_rope(model),
        **_tied(model),
    }


def _bloom(model: GgufHeader) -> Config:
    heads = model.integer("attention.head_count")
    if model.integer("attention.head_count_kv", heads) != heads:
        raise model.metadata.error(model.key("attention.head_count_kv"), f"{heads}, as heads")
    return {}


def _baichuan(model: GgufHeader) -> Config:
    """Return the entries of Baichuan; the larger size, with ALiBi, names its context otherwise."""
    config, context = _attention(model), model.integer("context_length")
    config.pop("num_key_value_heads")
    has_alibi = model.integer("block_count") == 40
    return config | {"model_max_length" if has_alibi else "max_position_embeddings": context}


def _qwen(model: GgufHeader) -> Config:
    return {
        "kv_channels": model.head_dim,
        "rotary_emb_base": model.number("rope.freq_base", 10_000.0),
        "use_dynamic_ntk": False,
        "use_logn_attn": False,
        **_tied(model),
    }


_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Sizes under the names that most families have."""


_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}


_MOE = {**_SIZES, **_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"}


_GPT_OSS = {
    **_SIZES,
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}


_LONG = {key: name for key, name in _SIZES.items() if key != "context_length"}


_FALCON = {**_SIZES, "feed_forward_length": "ffn_hidden_size"}


_BLOOM = {
    "block_count": "n_layer",
    "context_length": "seq_length",
    "embedding_length": "hidden_size",
    "attention.head_count": "n_head",
    "feed_forward_length": "n_inner",
}


_GPT2 = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
}


_CHATGLM = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}


_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}


_NORM = {"attention.layer_norm_epsilon": "layer_norm_epsilon"}


_LFM2 = {"attention.layer_norm_rms_epsilon": "norm_eps"}


_NEMOTRON = {"attention.layer_norm_epsilon": "norm_eps"}


_STARCODER = {"attention.layer_norm_epsilon": "norm_epsilon"}


_COHERE = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale?": "logit_scale"}


_QWEN = {
    "attention.layer_norm_epsilon?": "layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon?": "layer_norm_epsilon",
}


_GRANITE = {
    **_RMS,
    "attention.scale?": "attention_multiplier",
    "embedding_scale?": "embedding_multiplier",
    "logit_scale?": "logits_scaling",
    "residual_scale?": "residual_multiplier",
}


_CAP = {"final_logit_softcapping?": "final_logit_softcapping"}


_CAPS = {**_CAP, "attn_logit_softcapping?": "attn_logit_softcapping"}


FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "arcee": GgufFamily("ArceeForCausalLM", "arcee", _SIZES, _RMS, _with_mlp_bias),
        "baichuan": GgufFamily("BaichuanForCausalLM", "baichuan", _LONG, _RMS, _baichuan),
        "bloom": GgufFamily("BloomForCausalLM", "bloom", _BLOOM, _NORM, _bloom),
        "chatglm": GgufFamily("ChatGLMModel", "chatglm", _CHATGLM, {}, _chatglm),
        "cohere2": GgufFamily("Cohere2ForCausalLM", "cohere2", _SIZES, _COHERE, _cohere2),
        "command-r": GgufFamily("CohereForCausalLM", "cohere", _SIZES, _COHERE, _command_r),
        "deepseek": GgufFamily("DeepseekForCausalLM", "deepseek", _SIZES, _RMS, _deepseek),
        "deepseek2": GgufFamily("DeepseekV2ForCausalLM", "deepseek_v2", _SIZES, _RMS, _deepseek2),
        "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", "ernie4_5", _SIZES, _RMS, _use_bias),
        "exaone4": GgufFamily("Exaone4ForCausalLM", "exaone4", _SIZES, _RMS, _exaone4),
        "falcon": GgufFamily("FalconForCausalLM", "falcon", _FALCON, _NORM, _falcon),
        "gemma": GgufFamily("GemmaForCausalLM", "gemma", _SIZES, _RMS, _attention),
        "gemma2": GgufFamily("Gemma2ForCausalLM", "gemma2", _SIZES, _RMS | _CAPS, _gemma2),
        "gemma3": GgufFamily("Gemma3ForCausalLM", "gemma3_text", _SIZES, _RMS | _CAP, _gemma3),
        "glm4": GgufFamily("Glm4ForCausalLM", "glm4", _SIZES, _RMS, _glm),
        "glm4moe": GgufFamily("Glm4MoeForCausalLM", "glm4_moe", _SIZES, _RMS, _glm4_moe),
        "gpt-oss": GgufFamily("GptOssForCausalLM", "gpt_oss", _GPT_OSS, _RMS, _gpt_oss),
        "gpt2": GgufFamily("GPT2LMHeadModel", "gpt2", _GPT2, _NORM),
        "granite": GgufFamily("GraniteForCausalLM", "granite", _SIZES, _GRANITE, _with_mlp_bias),
        "granitemoe": GgufFamily(
            "GraniteMoeForCausalLM", "granitemoe", _GPT_OSS, _GRANITE, _granite_moe
        ),
        "lfm2": GgufFamily("Lfm2ForCausalLM", "lfm2", _SIZES, _LFM2, _lfm2),
        "llama": GgufFamily("LlamaForCausalLM", "llama", _SIZES, _RMS, _llama),
        "minimax-m2": GgufFamily("MiniMaxM2ForCausalLM", "minimax_m2", _GPT_OSS, _RMS, _minimax_m2),
        "nemotron": GgufFamily("NemotronForCausalLM", "nemotron", _SIZES, _NEMOTRON, _nemotron),
        "olmo2": GgufFamily("Olmo2ForCausalLM", "olmo2", _SIZES, _RMS, _olmo2),
        "olmoe": GgufFamily("OlmoeForCausalLM", "olmoe", _SIZES | _EXPERTS, _RMS, _olmoe),
        "phi3": GgufFamily("Phi3ForCausalLM", "phi3", _SIZES, _RMS, _phi3),
        "qwen": GgufFamily("QWenLMHeadModel", "qwen", _SIZES, _QWEN, _qwen),
        "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2", _SIZES, _RMS, _attention),
        "qwen2moe": GgufFamily(
            "Qwen2MoeForCausalLM", "qwen2_moe", _SIZES | _EXPERTS, _RMS, _qwen2_moe
        ),
        "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3", _SIZES, _RMS, _biased),
        "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", _MOE, _RMS, _qwen3_moe),
        "seed_oss": GgufFamily("SeedOssForCausalLM", "seed_oss", _SIZES, _RMS, _seed_oss),
        "smollm3": GgufFamily("SmolLM3ForCausalLM", "smollm3", _SIZES, _RMS, _with_mlp_bias),
        "starcoder2": GgufFamily(
            "Starcoder2ForCausalLM", "starcoder2", _SIZES, _STARCODER, _use_bias
        ),
    }
)
"""Families by the architecture's name in files."""
