"""Model shapes: sizes from which costs count weights, KV cache and arithmetic."""

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
