"""Models and devices as numbers: shapes, peak rates, links.

Owns the tables that a name on the command line stands for. Knows nothing of time: that is a cost
model's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

BYTES_PER_ELEMENT = 2
"""Bytes per weight, activation or KV entry: bfloat16."""
BYTES_PER_LOGIT = 4
"""Bytes per logit: float32."""


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with gated MLP and grouped queries."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    head_dim: int = 128
    tied: bool = False
    """The LM head is the embedding's matrix."""

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.mlp

    @property
    def head_weights(self) -> int:
        """Weights of the LM head; the embedding has as many."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.layers * self.layer_weights + self.head_weights * (1 if self.tied else 2)

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token in one layer's KV cache."""
        return 2 * self.kv_heads * self.head_dim * BYTES_PER_ELEMENT

    def stage_bytes(self, stage: int, layer_counts: list[int]) -> int:
        """Bytes of the weights that a stage holds."""
        ends = (stage == 0) + (stage == len(layer_counts) - 1)
        if self.tied and len(layer_counts) == 1:
            ends = 1
        return BYTES_PER_ELEMENT * (
            layer_counts[stage] * self.layer_weights + ends * self.head_weights
        )

    def shard(self, ranks: int) -> "ModelShape":
        """Return the shape of what one of `ranks` ranks holds and computes.

        Attention is cut by heads, the MLP by its inner size, embedding and LM head by rows of the
        vocabulary. With fewer KV heads than ranks each rank has one.

        Raises:
            ValueError: The sizes do not divide.
        """
        few, many = sorted((self.kv_heads, ranks))
        if self.heads % ranks or self.mlp % ranks or many % few:
            raise ValueError(
                f"{self.heads} heads, {self.kv_heads} KV heads and an MLP of {self.mlp} do not "
                f"divide into {ranks} ranks: choose another --tp"
            )
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            mlp=self.mlp // ranks,
            vocabulary=-(-self.vocabulary // ranks),
        )


@dataclass(frozen=True)
class DeviceSpec:
    """Peak rates from its data sheet: dense bf16 FLOP/s, bytes/s, bytes."""

    flops: float
    bandwidth: float
    memory: float


@dataclass(frozen=True)
class NetworkLink:
    """Between neighbouring stages, or the ranks of one: bytes/s, seconds."""

    bandwidth: float
    latency: float


MODELS = {
    "qwen2.5-0.5b": ModelShape(24, 896, 14, 2, 4864, 151936, head_dim=64, tied=True),
    "qwen2.5-7b": ModelShape(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": ModelShape(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": ModelShape(64, 5120, 40, 8, 27648, 152064),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 28672, 128256),
    # The paper cuts layers off Llama-3.1-405B's shape until 100B parameters are left.
    "llama-100b": ModelShape(30, 16384, 128, 8, 53248, 128256),
}

DEVICES = {
    "L20": DeviceSpec(119.5e12, 864e9, 48e9),
    "A100-40G": DeviceSpec(312e12, 1555e9, 40e9),
    "A100-80G": DeviceSpec(312e12, 2039e9, 80e9),
    "A800-80G": DeviceSpec(312e12, 2039e9, 80e9),
    "RTX4090": DeviceSpec(165e12, 1008e9, 24e9),
    "H200": DeviceSpec(989e12, 4800e9, 141e9),
}
"""Data sheets; of the RTX 4090 the fp16 rate with fp32 accumulation."""

LINKS = {
    "pcie": NetworkLink(20.79e9, 10e-6),
    "network": NetworkLink(73.28e9 / 8, 50e-6),
    "nvlink": NetworkLink(250e9, 5e-6),
}
"""Bandwidths of PCIe and the simulated network as measured by arXiv 2504.14775; the latencies and
NVLink's usable rate are assumptions."""


def format_degrees(degrees: Sequence[int]) -> str:
    """Return numbers of ranks as in --tp; none stand for one rank per stage."""
    return ",".join(map(str, degrees)) or "1"


def split_layers_evenly(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage.

    The remainder goes to the middle stages, which have neither embedding nor LM head.
    Raises ValueError for more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages")
    share, rest = divmod(layers, stages)
    order = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0, stage))
    return [share + (stage in order[:rest]) for stage in range(stages)]
