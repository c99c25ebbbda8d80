"""GPT-J.

Source: Wang and Komatsuzaki, "GPT-J-6B" (2021), https://github.com/kingoflolz/mesh-transformer-jax.
"""

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.attention import AttentionSpec
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import EmbeddingSpec, HeadSpec, ModelSpec
from gllm.models.spec.parts import LinearSpec, RopeSpec
from gllm.models.spec_builders import ACTIVATIONS, layer_norm_spec, plain_mlp_spec


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of GPT-J: parallel layers with one norm, a part of each head rotated."""
    hidden = config.positive_int("n_embd", default=4096)
    heads = config.positive_int("n_head", default=16)
    if hidden % heads:
        raise config.error(("n_head",), f"a divisor of n_embd {hidden}", heads)
    head_dim = hidden // heads
    rotated = config.positive_int("rotary_dim", default=64)
    if rotated % 2 or rotated > head_dim:
        raise config.error(("rotary_dim",), f"even, at most {head_dim}", rotated)
    for name in ("rotary", "scale_attn_weights"):
        config.require_value(name, True)
    config.require_value("tie_word_embeddings", False)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        qkv_proj=LinearSpec(("attn.q_proj", "attn.k_proj", "attn.v_proj")),
        out_proj=LinearSpec(("attn.out_proj",)),
        scale=head_dim**-0.5,
        rope=RopeSpec(rotated, is_interleaved=True),
    )
    mlp = plain_mlp_spec(
        config.positive_int("n_inner", default=4 * hidden),
        config.choice("activation_function", ACTIVATIONS, "gelu_new"),
        ("mlp.fc_in", "mlp.fc_out"),
    )
    layer = LayerSpec(attention, mlp, layer_norm_spec(config, "ln_1"), None, is_parallel=True)
    return ModelSpec(
        vocab_size=config.positive_int("vocab_size", default=50400),
        hidden_size=hidden,
        embedding=EmbeddingSpec("transformer.wte"),
        layers=(layer,) * config.positive_int("n_layer", default=28),
        norm=layer_norm_spec(config, "transformer.ln_f"),
        head=HeadSpec("lm_head", has_bias=True),
        context_length=config.positive_int("n_positions", "n_ctx", default=2048),
        layer_name_format="transformer.h.{}",
        # Masks in older files.
        ignored_tensors=(r".*\.attn\.(bias|masked_bias)",),
    )
