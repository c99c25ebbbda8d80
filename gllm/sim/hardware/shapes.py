"""Shapes of decoders by name: weights, bytes of the KV cache, arithmetic of a micro-batch."""

from dataclasses import dataclass, replace
from functools import cache

from gllm.scheduler.stage_work import StageWork
from gllm.sim.hardware.devices import HostSpec

BYTES_PER_ELEMENT = 2
"""Bytes per activation or KV entry: bfloat16."""
BYTES_PER_LOGIT = 4
"""Bytes per logit: float32."""
FLOPS_PER_WEIGHT = 2
"""FLOP per token and weight: one multiplication, one addition."""
FLOPS_PER_PAIR = 4
"""FLOP per query-key pair and element of a head: the score and the weighted sum of the values."""


@dataclass(frozen=True)
class ExpertOffload:
    """Routed experts in the memory of the host, whose cores compute them."""

    num_layers: int
    """Number of these layers, the first of the model with experts."""
    num_cached: int
    """Experts of each of them that the device has too."""
    host: HostSpec


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes of the mixture-of-experts (MoE) layers of a model, which replace most MLP layers."""

    num_experts: int
    """Number of routed experts in each layer."""
    num_active: int
    """Number of routed experts that each token uses."""
    mlp: int
    """Intermediate size of one expert."""
    num_shared: int = 0
    """Number of shared experts, which every token uses."""
    num_dense_layers: int = 0
    """Number of layers at the start of the model that have a dense MLP instead of experts."""
    offload: "ExpertOffload | None" = None
    """Layers whose routed experts are on the host; None for none."""

    @property
    def num_on_host(self) -> int:
        """Number of layers, the first with experts, whose routed experts are on the host."""
        return 0 if self.offload is None else self.offload.num_layers

    def expected_experts(self, num_tokens: int) -> float:
        """Return the expected number of routed experts that a batch of tokens reads.

        Assumes that a token's experts are drawn uniformly and independently of other tokens.
        """
        unread = (1 - self.num_active / self.num_experts) ** num_tokens
        return self.num_experts * (1 - unread)


@dataclass(frozen=True)
class LatentShape:
    """Sizes of multi-head latent attention (MLA), which caches one compressed vector per token.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    kv_rank: int
    """Size of the compressed keys and values."""
    rope_dim: int
    """Size per head of queries and keys with rotary embedding; heads share these keys."""
    nope_dim: int
    """Size per head of queries and keys without rotary embedding."""
    value_dim: int
    """Size per head of the values."""
    query_rank: int = 0
    """Size of the compressed queries; 0 if they are not compressed."""

    @property
    def cached_elements(self) -> int:
        """Number of elements that one token has in one layer's KV cache."""
        return self.kv_rank + self.rope_dim

    def weights(self, hidden: int, heads: int) -> int:
        """Return the number of weights in the projections of one layer."""
        query_width = heads * (self.nope_dim + self.rope_dim)
        query = self.query_rank * (hidden + query_width) or hidden * query_width
        compress = hidden * self.cached_elements
        expand = self.kv_rank * heads * (self.nope_dim + self.value_dim)
        return query + compress + expand + heads * self.value_dim * hidden


@dataclass(frozen=True)
class RecurrentShape:
    """Recurrent layers of a model, which have a state per sequence instead of a KV cache."""

    num_layers: int
    state_bytes: int
    """Bytes of the state of one sequence in one of these layers."""
    flops: int
    """FLOP with which one token updates and reads the state in one of these layers."""


CONTEXT_TOKENS = 32_768
"""Longest sequence on an emulated device, for models without learned positions."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer, with its FLOPs, weight bytes and KV cache bytes.

    Sizes are numbers of elements; norms and biases are left out.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    """Intermediate size of the dense MLP."""
    vocabulary: int
    head_dim: int = 128
    tied: bool = False
    """True if the LM head shares the weights of the embedding."""
    gated: bool = True
    """True if the MLP has a gate: three matrices instead of two."""
    positions: int = 0
    """Number of learned position embeddings; 0 if positions are not learned."""
    bytes_per_weight: float = BYTES_PER_ELEMENT
    """Bytes per weight: 2 for bfloat16, 1 for fp8 or int8, 0.5 for 4 bits."""
    experts: ExpertsShape | None = None
    latent: LatentShape | None = None
    max_context: int = 0
    """Longest sequence in tokens by the model's configuration file; 0 if unknown."""
    recurrent: RecurrentShape | None = None
    """Recurrent layers; their weights are counted as those of attention, and KV cache and
    attention are means over all layers."""
    kv_share: float | None = None
    """Keys and values of all layers over those that `kv_heads` and `head_dim` give, where layers
    differ; None: recurrent layers have none, all others the same."""

    @property
    def context(self) -> int:
        """Longest sequence in tokens on an emulated device."""
        return self.positions or CONTEXT_TOKENS

    @property
    def attention_weights(self) -> int:
        """Number of weights of one layer's attention."""
        if self.latent:
            return self.latent.weights(self.hidden, self.heads)
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def layer_weights(self) -> int:
        """Number of weights of one layer with a dense MLP."""
        return self.attention_weights + self._mlp_weights(self.mlp)

    @property
    def expert_weights(self) -> int:
        """Number of weights of one expert."""
        return self._mlp_weights(self.experts.mlp) if self.experts else 0

    @property
    def num_dense_layers(self) -> int:
        """Number of layers, the model's first, with the dense MLP."""
        return self.experts.num_dense_layers if self.experts else self.layers

    @property
    def sparse_layer_weights(self) -> int:
        """Number of weights of one MoE layer: attention, router, routed and shared experts."""
        if not self.experts:
            return 0
        return self._sparse_base_weights + self.experts.num_experts * self.expert_weights

    @property
    def head_weights(self) -> int:
        """Number of weights of the LM head, and of the token embedding."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Number of weights of the whole model."""
        return self.weights_of_layers(0, self.layers) + self._end_weights(True, True)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token in one layer's KV cache, as a mean over all layers."""
        if self.latent:
            return self._mean(self.latent.cached_elements * BYTES_PER_ELEMENT)
        return self._mean(2 * self.kv_heads * self.head_dim * BYTES_PER_ELEMENT)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence in one layer, as a mean over all layers."""
        recurrent = self.recurrent
        return recurrent.num_layers * recurrent.state_bytes // self.layers if recurrent else 0

    @property
    def state_flops(self) -> int:
        """FLOP of the recurrences of one token in one layer, as a mean over all layers."""
        recurrent = self.recurrent
        return recurrent.num_layers * recurrent.flops // self.layers if recurrent else 0

    def _mean(self, number: int) -> int:
        """Return the mean over all layers of a number of the layers with a full KV cache entry."""
        share = self.kv_share
        if share is None:
            share = 1 - self.recurrent.num_layers / self.layers if self.recurrent else 1
        return number if share == 1 else round(number * share)

    @property
    def prefill_pair_flops(self) -> int:
        """FLOPs of one query-key pair of a prefill chunk in one layer, over all heads."""
        if self.latent:
            key_dim = self.latent.nope_dim + self.latent.rope_dim
            return self._mean(2 * self.heads * (key_dim + self.latent.value_dim))
        return self._mean(FLOPS_PER_PAIR * self.heads * self.head_dim)

    @property
    def decode_pair_flops(self) -> int:
        """FLOPs of one query-key pair of a decode in one layer, over all heads."""
        if self.latent:
            return self._mean(2 * self.heads * (self.latent.cached_elements + self.latent.kv_rank))
        return self._mean(FLOPS_PER_PAIR * self.heads * self.head_dim)

    def weights_of_layers(self, first: int, count: int) -> int:
        """Return the number of weights of `count` layers, from layer `first` on."""
        num_dense = self.count_dense_layers(first, count)
        return num_dense * self.layer_weights + (count - num_dense) * self.sparse_layer_weights

    def count_dense_layers(self, first: int, count: int) -> int:
        """Return the number of layers with the dense MLP among `count` layers from `first` on."""
        return max(0, min(count, self.num_dense_layers - first))

    def count_host_layers(self, first: int, count: int) -> int:
        """Return the number of layers with experts on the host among `count` from `first` on."""
        if self.experts is None:
            return 0
        begin = self.num_dense_layers
        end = begin + self.experts.num_on_host
        return max(0, min(first + count, end) - max(first, begin))

    def read_weights(self, num_tokens: int) -> float:
        """Return the expected number of weights that an MoE layer reads for a batch of tokens."""
        if not self.experts or not num_tokens:
            return 0.0
        read = self.experts.expected_experts(num_tokens)
        return self._sparse_base_weights + read * self.expert_weights

    @property
    def active_weights(self) -> int:
        """Number of weights of an MoE layer that each token uses."""
        if not self.experts:
            return 0
        return self._sparse_base_weights + self.experts.num_active * self.expert_weights

    def step_flops(self, work: StageWork) -> float:
        """Return the FLOPs of a micro-batch on all layers and the LM head, as counted for MFU."""
        num_dense = self.num_dense_layers
        per_token = num_dense * self.layer_weights
        per_token += (self.layers - num_dense) * self.active_weights
        pair_flops = work.num_query_key_pairs * self.prefill_pair_flops
        pair_flops += work.num_decode_context_tokens * self.decode_pair_flops
        pair_flops += work.num_tokens * self.state_flops
        matrices = per_token * work.num_tokens + self.head_weights * work.num_sampled_rows
        return FLOPS_PER_WEIGHT * matrices + self.layers * pair_flops

    def elementwise_bytes(self, is_sparse: bool = False) -> int:
        """Return the bytes per token that the element-wise operators of a layer read and write.

        Two norms, two residual additions, the activation of the MLP, rotary embedding and the
        writing of the KV cache; `is_sparse`: of a layer with experts.
        """
        inner = self.mlp
        if is_sparse and self.experts:
            inner = (self.experts.num_active + self.experts.num_shared) * self.experts.mlp
        # A norm reads and writes its input once, an addition reads two. An activation reads gate
        # and projection. RoPE reads and writes queries and keys.
        norms_and_additions = (2 * 2 + 2 * 3) * self.hidden
        activation = (3 if self.gated else 2) * inner
        rotation = 2 * (self.heads + self.kv_heads) * self.head_dim
        elements = norms_and_additions + activation + rotation
        return BYTES_PER_ELEMENT * elements + 2 * self.kv_bytes

    def stage_bytes(self, stage: int, layer_counts: list[int]) -> float:
        """Return the bytes of the weights of a stage on its devices."""
        first, count = sum(layer_counts[:stage]), layer_counts[stage]
        ends = self._end_weights(stage == 0, stage == len(layer_counts) - 1)
        weights = self.weights_of_layers(first, count) + ends
        if self.experts is not None and (offload := self.experts.offload) is not None:
            num_absent = self.experts.num_experts - offload.num_cached
            weights -= self.count_host_layers(first, count) * num_absent * self.expert_weights
        return self.bytes_per_weight * weights

    def shard(self, ranks: int) -> "ModelShape":
        """Return the model shape as one of `ranks` tensor-parallel ranks sees it."""
        return _shard(self, ranks)

    @property
    def unrouted_weights(self) -> int:
        """Number of weights of an MoE layer without its routed experts."""
        return self._sparse_base_weights

    @property
    def _sparse_base_weights(self) -> int:
        """Weights of a layer with experts that every token passes: attention, router, shared."""
        if not self.experts:
            return 0
        router = self.hidden * self.experts.num_experts
        shared = self.experts.num_shared * self.expert_weights
        return self.attention_weights + router + shared

    def _mlp_weights(self, inner: int) -> int:
        return (3 if self.gated else 2) * self.hidden * inner

    def _end_weights(self, is_first: bool, is_last: bool) -> int:
        """Return the weights of embeddings (first stage) and LM head (last stage)."""
        num_tables = is_first + is_last
        if self.tied and is_first and is_last:
            num_tables = 1
        return num_tables * self.head_weights + is_first * self.positions * self.hidden


@cache
def _shard(shape: ModelShape, ranks: int) -> ModelShape:
    """Compute `ModelShape.shard`; planners ask for the same few shapes thousands of times."""
    few, many = sorted((shape.kv_heads, ranks))
    expert_mlp = shape.experts.mlp if shape.experts else 0
    if shape.heads % ranks or shape.mlp % ranks or expert_mlp % ranks or many % few:
        raise ValueError(
            f"{shape.heads} heads, {shape.kv_heads} KV heads and an MLP of "
            f"{expert_mlp or shape.mlp} do not divide into {ranks} ranks: choose another --tp"
        )
    return replace(
        shape,
        heads=shape.heads // ranks,
        kv_heads=max(1, shape.kv_heads // ranks),
        mlp=shape.mlp // ranks,
        vocabulary=-(-shape.vocabulary // ranks),
        experts=shape.experts and replace(shape.experts, mlp=expert_mlp // ranks),
        recurrent=shape.recurrent
        and replace(
            shape.recurrent,
            state_bytes=shape.recurrent.state_bytes // ranks,
            flops=shape.recurrent.flops // ranks,
        ),
    )


def _opt(layers: int, hidden: int, heads: int) -> ModelShape:
    """Return an OPT model: an MLP of four times the hidden size, one KV head per head."""
    return ModelShape(
        layers, hidden, heads, heads, 4 * hidden, 50272,
        head_dim=hidden // heads, tied=True, gated=False, positions=2050, max_context=2048,
    )  # fmt: skip


MODELS = {
    "qwen2.5-0.5b": ModelShape(
        24, 896, 14, 2, 4864, 151936, head_dim=64, tied=True, max_context=32_768
    ),
    "qwen2.5-7b": ModelShape(28, 3584, 28, 4, 18944, 152064, max_context=32_768),
    "qwen2.5-14b": ModelShape(48, 5120, 40, 8, 13824, 152064, max_context=32_768),
    "qwen2.5-32b": ModelShape(64, 5120, 40, 8, 27648, 152064, max_context=32_768),
    "qwen-72b": ModelShape(80, 8192, 64, 64, 24576, 152064, max_context=32_768),
    "llama-2-7b": ModelShape(32, 4096, 32, 32, 11008, 32000, max_context=4_096),
    "llama-2-13b": ModelShape(40, 5120, 40, 40, 13824, 32000, max_context=4_096),
    "llama-2-70b": ModelShape(80, 8192, 64, 8, 28672, 32000, max_context=4_096),
    "llama-30b": ModelShape(60, 6656, 52, 52, 17920, 32000, max_context=2_048),
    "llama-3-8b": ModelShape(32, 4096, 32, 8, 14336, 128256, max_context=8_192),
    "llama-3-70b": ModelShape(80, 8192, 64, 8, 28672, 128256, max_context=8_192),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 14336, 128256, max_context=131_072),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 28672, 128256, max_context=131_072),
    # The paper cuts layers off Llama-3.1-405B's shape until 100B parameters are left.
    "llama-100b": ModelShape(30, 16384, 128, 8, 53248, 128256, max_context=131_072),
    "codellama-34b": ModelShape(48, 8192, 64, 8, 22016, 32000, max_context=16_384),
    "internlm-20b": ModelShape(60, 5120, 40, 40, 13824, 103168, max_context=4_096),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "bloom-176b": ModelShape(
        70, 14336, 112, 112, 57344, 250880, tied=True, gated=False, max_context=2_048
    ),
    "mixtral-8x7b": ModelShape(
        32, 4096, 32, 8, 14336, 32000, experts=ExpertsShape(8, 2, 14336), max_context=32_768
    ),
    "deepseek-v2-lite": ModelShape(
        27, 2048, 16, 16, 10944, 102400,
        experts=ExpertsShape(64, 6, 1408, num_shared=2, num_dense_layers=1),
        latent=LatentShape(512, 64, 128, 128), max_context=163_840,
    ),
    "deepseek-v3": ModelShape(
        61, 7168, 128, 128, 18432, 129280, bytes_per_weight=1.0,
        experts=ExpertsShape(256, 8, 2048, num_shared=1, num_dense_layers=3),
        latent=LatentShape(512, 64, 128, 128, query_rank=1536), max_context=163_840,
    ),
}  # fmt: skip
"""Shapes from the models' configuration files; DeepSeek-V3's weights are fp8."""
