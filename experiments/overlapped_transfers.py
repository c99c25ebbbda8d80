"""Transfers of KV cache that overlap with the prefill: costs and simulated links.

Source: "Splitwise" (ISCA'24, arXiv 2311.18677), section IV-C.
"""

from collections.abc import Callable
from dataclasses import dataclass

from experiments.transfer_mode import TransferMode, TransferModePolicy
from gllm.sim.cluster.handoffs import KvNetwork
from gllm.sim.hardware.devices import NetworkLink


@dataclass(frozen=True)
class TransferCosts:
    """Costs of a prefill and its transfer, all linear in the tokens.

    Raises:
        ValueError: A value is out of its range.
    """

    num_layers: int
    bytes_per_token: float
    """KV cache of one token over all layers, in bytes."""
    bytes_per_second: float
    """Rate of the link."""
    prefill_tokens_per_second: float
    fixed_seconds: float = 0.0
    """Duration of a transfer of no bytes."""
    layer_seconds: float = 0.0
    """Duration of one layer's transfer without its bytes; at least that long is visible."""
    interference_seconds: float = 0.0
    """Time by which one layer's transfer delays the prefill."""

    def __post_init__(self) -> None:
        """Check the values."""
        positive = ("num_layers", "bytes_per_token", "bytes_per_second")
        for name in (*positive, "prefill_tokens_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be positive")
        for name in ("fixed_seconds", "layer_seconds", "interference_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 0")

    def layer_transfer_seconds(self, num_tokens: int) -> float:
        """Return the duration of one layer's transfer."""
        bytes_per_layer = num_tokens * self.bytes_per_token / self.num_layers
        return self.layer_seconds + bytes_per_layer / self.bytes_per_second

    def layer_compute_seconds(self, num_tokens: int) -> float:
        """Return the duration of one layer's computation."""
        return num_tokens / self.prefill_tokens_per_second / self.num_layers

    def visible_seconds(self, mode: TransferMode, num_tokens: int) -> float:
        """Return the time from the end of the prefill to the end of the transfer.

        The link sends one layer after another, so a per-layer transfer ends one layer after the
        prefill if a layer takes longer to compute than to send.
        """
        if mode is TransferMode.SERIALIZED:
            return self.fixed_seconds + num_tokens * self.bytes_per_token / self.bytes_per_second
        transfer = self.layer_transfer_seconds(num_tokens)
        excess = max(0.0, transfer - self.layer_compute_seconds(num_tokens))
        return transfer + (self.num_layers - 1) * excess

    def added_seconds(self, mode: TransferMode, num_tokens: int) -> float:
        """Return the time by which a transfer delays the second token, interference included."""
        visible = self.visible_seconds(mode, num_tokens)
        if mode is TransferMode.SERIALIZED:
            return visible
        return visible + self.num_layers * self.interference_seconds


class OverlappedKvNetwork(KvNetwork):
    """Links whose transfers may run during the prefill; a link then carries the visible rest.

    The link sees nothing of a transfer before the prefill ends, so transfers of several prompts at
    once hide more than they could. The latency of a link is a part of every transfer.

    Args:
        network: Bandwidth in bytes/s and latency in seconds of each link.
        bytes_per_token: KV cache of one token in bytes, over all layers.
        num_layers: Layers of the model.
        predict_prefill: Returns the seconds of a prefill of a number of tokens.
        modes: Chooses the mode of each transfer.
        layer_seconds: Duration of one layer's transfer without its bytes.
    """

    def __init__(
        self,
        network: NetworkLink,
        bytes_per_token: int,
        num_layers: int,
        predict_prefill: Callable[[int], float],
        modes: TransferModePolicy,
        layer_seconds: float = 0.0,
    ) -> None:
        super().__init__(network, bytes_per_token)
        self._num_layers, self._predict_prefill = num_layers, predict_prefill
        self._modes, self._layer_seconds = modes, layer_seconds

    def num_bytes(self, source: str, target: str, num_tokens: int) -> int:
        """Return the bytes that the link carries after the prefill."""
        mode = self._modes.choose(num_tokens)
        if mode is TransferMode.SERIALIZED:
            return super().num_bytes(source, target, num_tokens)
        bandwidth = self.network.bandwidth
        costs = TransferCosts(
            self._num_layers,
            self.bytes_per_token,
            bandwidth,
            num_tokens / self._predict_prefill(num_tokens),
            layer_seconds=self._layer_seconds,
        )
        return max(1, round(costs.visible_seconds(mode, num_tokens) * bandwidth))
