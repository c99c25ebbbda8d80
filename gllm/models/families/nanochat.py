"""nanochat.

Source: Karpathy, "nanochat" (2025), https://github.com/karpathy/nanochat.
"""

from dataclasses import replace

from gllm.models.config_reader import ConfigReader
from gllm.models.spec.layer import LayerSpec
from gllm.models.spec.model import ModelSpec
from gllm.models.spec.parts import NormSpec
from gllm.models.spec_builders import attention_spec, decoder_model, plain_mlp_spec


def build_spec(config: ConfigReader) -> ModelSpec:
    """Build the ModelSpec of nanochat: norms without weights, also of heads after the rotation."""
    config.require_value("hidden_act", "relu2")
    attention = attention_spec(config)
    rope = attention.rope
    if rope is None or rope.kind != "default":
        raise config.error(("rope_parameters",), "without scaling", rope and rope.kind)
    attention = replace(
        attention,
        # Pairs turn in the other direction than elsewhere.
        rope=replace(rope, kind="linear", parameters={"factor": -1.0}),
        query_norm=_norm(config, "q_norm"),
        key_norm=_norm(config, "k_norm"),
        norm_follows_rope=True,
    )
    size = config.positive_int("intermediate_size")
    mlp = plain_mlp_spec(size, "relu2", ("mlp.fc1", "mlp.fc2"), bias=False)
    norms = _norm(config, "input_layernorm"), _norm(config, "post_attention_layernorm")
    layer = LayerSpec(attention, mlp, *norms)
    model = decoder_model(
        config,
        [layer] * config.positive_int("num_hidden_layers"),
        norm=_norm(config, "model.norm"),
        context_length=config.positive_int("max_position_embeddings"),
    )
    cap = config.optional_positive_float("final_logit_softcapping", default=15.0)
    return replace(
        model,
        embedding=replace(model.embedding, norm=_norm(config, "model.norm")),
        head=replace(model.head, softcap=cap),
    )


def _norm(config: ConfigReader, name: str) -> NormSpec:
    eps = config.positive_float("rms_norm_eps", default=1e-6)
    return NormSpec(name, "rms", eps, has_weight=False)
