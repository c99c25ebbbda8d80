"""What a published configuration could ask besides, and a family does not do: refused by name."""

import pytest

from gllm.models.errors import ModelError
from gllm.models.rope import ROPE_KEYS
from tests.support.models.published import PUBLISHED, Config, read

REFUSED: list[tuple[str, Config, str]] = [
    ("llama-2-7b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("llama-2-7b", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    ("llama-2-7b", {"sliding_window": 512}, "'sliding_window'"),
    ("mistral-7b-v0.1", {"attention_bias": True}, "attention_bias True"),
    ("mistral-7b-v0.1", {"sliding_window": "4096"}, "sliding_window is '4096'"),
    ("mixtral-8x7b", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    ("mixtral-8x7b", {"hidden_act": "relu2"}, "hidden_act 'relu2'"),
    ("qwen-7b-chat", {"rotary_pct": 0.5}, "rotary_pct 0.5"),
    ("qwen-7b-chat", {"kv_channels": 64}, "times kv_channels 64"),
    ("qwen-7b-chat", {"intermediate_size": 11007}, "intermediate_size is 11007"),
    ("qwen-7b-chat", {"seq_length": None}, "seq_length is None"),
    ("qwen-7b-chat", {"use_cache_quantization": True}, "use_cache_quantization True"),
    ("qwen-7b-chat", {"rotary_emb_base": 0.5}, "rotary_emb_base is 0.5"),
    ("qwen-7b-chat", {"visual": {"layers": 48}}, "'visual'"),
    ("qwen2.5-7b", {"use_mrope": True}, "use_mrope True"),
    ("qwen2.5-7b", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention"),
    ("qwen1.5-moe-a2.7b", {"use_sliding_window": True}, "use_sliding_window True"),
    ("qwen3-4b", {"layer_types": ["chunked_attention"] * 36}, "layer_types"),
    ("qwen3-30b-a3b", {"use_sliding_window": True}, "use_sliding_window True"),
    ("gemma-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("gemma-2b", {"sliding_window": 4096}, "'sliding_window'"),
    ("gemma-2b", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping'"),
    ("gemma-2b", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
    ("gemma-2-9b", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("gemma-2-9b", {"sliding_window_size": 2048}, "sliding_window_size 2048"),
    ("gemma-2-9b", {"hidden_activation": "tanh"}, "hidden_activation 'tanh'"),
    ("gemma-3-1b-it", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    ("gemma-3-1b-it", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ("phi-3-mini-128k", {"lm_head_bias": True}, "lm_head_bias True"),
    ("phi-3-mini-128k", {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48}}, "lacks"),
    ("phi-4-mini", {"full_attn_mod": 2}, "full_attn_mod 2"),
    ("phi-4-mini", {"partial_rotary_factor": 0.5}, "48 numbers, but 32 pairs"),
    ("command-r", {"rotary_pct": 0.5}, "'rotary_pct'"),
    ("command-r7b", {"rotary_pct": 0.5}, "rotary_pct 0.5"),
    ("command-r7b", {"order_of_interleaved_layers": "global_attn_first"}, "order_of_interleaved"),
    ("command-r7b", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
    ("command-r7b", {"use_parallel_block": False}, "use_parallel_block False"),
    ("command-r7b", {"layer_switch": 3}, "layer_switch 3"),
    ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings False"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention True"),
    ("gpt2", {"n_head": 7}, "n_head 7"),
    ("gpt2-medium", {"n_special": 3}, "n_special 3"),
    ("opt-1.3b", {"do_layer_norm_before": False}, "do_layer_norm_before False"),
    ("opt-1.3b", {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512"),
    ("opt-1.3b", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ("bloom-560m", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
    ("bloom-560m", {"num_attention_heads": 15}, "num_attention_heads 15"),
    ("falcon-7b", {"apply_residual_connection_post_layernorm": True}, "apply_residual"),
    ("falcon-7b", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn 2"),
    ("falcon-40b", {"num_kv_heads": 7}, "num_kv_heads 7"),
    ("chatglm3-6b", {"rmsnorm": False}, "rmsnorm False"),
    ("chatglm3-6b", {"original_rope": False}, "original_rope False"),
    ("chatglm3-6b", {"post_layer_norm": False}, "post_layer_norm False"),
    ("chatglm3-6b", {"pre_seq_len": 128}, "pre_seq_len 128"),
    ("chatglm3-6b", {"quantization_bit": 4}, "quantization_bit 4"),
    ("chatglm3-6b", {"multi_query_group_num": 5}, "multi_query_group_num 5"),
    ("glm-4-9b-chat", {"num_hidden_layers": 39}, "num_hidden_layers 39"),
    ("glm-4-9b-chat-hf", {"partial_rotary_factor": 0.51}, "65 of head_dim 128"),
    ("glm-4-9b-0414", {"use_qk_norm": True}, "use_qk_norm True"),
    ("baichuan2-7b", {"hidden_act": "swiglu"}, "hidden_act 'swiglu'"),
    (
        "baichuan2-13b",
        {"model_max_length": None},
        "max_position_embeddings or model_max_length is None",
    ),
    ("deepseek-moe-16b", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    ("deepseek-moe-16b", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek-moe-16b", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5"),
    ("deepseek-moe-16b", {"kv_lora_rank": 512}, "'kv_lora_rank'"),
    ("deepseek-v2-lite", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob True"),
    ("deepseek-v2-lite", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
    ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
    ("deepseek-v3", {"attention_bias": True}, "attention_bias True"),
]


@pytest.mark.parametrize(("name", "changes", "named"), REFUSED, ids=str)
def test_refused_by_name(name: str, changes: Config, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(PUBLISHED[name] | changes)


def test_every_family_refuses_something() -> None:
    refusing = {PUBLISHED[name]["architectures"][0] for name, _, _ in REFUSED}
    assert refusing == {raw["architectures"][0] for raw in PUBLISHED.values()}


def test_unknown_keys_are_refused() -> None:
    for raw in PUBLISHED.values():
        for changes in ({"brand_new": 1}, {"quantization_config": {"bits": 4}}):
            with pytest.raises(ModelError, match=next(iter(changes))):
                read(raw | changes)


def test_kinds_of_rotation_are_refused_in_all_families_that_rotate() -> None:
    assert "ntk" not in ROPE_KEYS
    for raw in PUBLISHED.values():
        ropes = {layer.attention.rope for layer in read(raw).layers}
        if ropes != {None} and raw["model_type"] != "chatglm":
            changed = raw | {"rope_scaling": {"type": "ntk", "factor": 2.0}}
            with pytest.raises(ModelError, match="'ntk'"):
                read(changed)
