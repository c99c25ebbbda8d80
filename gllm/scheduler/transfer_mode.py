"""Decision whether KV cache is transferred after the prompt or layer by layer during it.

A per-layer transfer hides behind the computation of the next layers, but costs the sender and the
link something per layer, so short prompts are sent serialized. All functions are pure.

Source: "Splitwise" (ISCA'24, arXiv 2311.18677), section IV-C.
"""

from dataclasses import dataclass
from enum import Enum
from math import floor

DEFAULT_THRESHOLD_TOKENS = 512
"""The paper's threshold on H100s; until one is calibrated."""


class TransferMode(Enum):
    """Time at which the layers of a KV cache are sent."""

    SERIALIZED = "serialized"
    """All layers after the prompt."""
    PER_LAYER = "per-layer"
    """Each layer once it is computed."""


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


def calibrate_threshold(costs: TransferCosts) -> int | None:
    """Return the least number of tokens for which a per-layer transfer adds less time.

    Its advantage grows with the tokens: the difference of the added times is the larger one of two
    falling lines, one where a layer is sent faster than computed and one where it is not. The
    threshold follows their zeros.

    Returns:
        The number of tokens; None if a serialized transfer is never slower.
    """
    count = costs.num_layers
    if count == 1:
        # There is no later layer to hide behind.
        extra = costs.layer_seconds + costs.interference_seconds
        return 1 if extra < costs.fixed_seconds else None
    link_seconds = costs.bytes_per_token / costs.bytes_per_second
    compute_seconds = 1 / costs.prefill_tokens_per_second
    interference = count * costs.interference_seconds - costs.fixed_seconds
    hidden = (costs.layer_seconds + interference) / ((count - 1) / count * link_seconds)
    exposed = count * costs.layer_seconds + interference
    exposed /= (count - 1) / count * compute_seconds
    threshold = max(1, floor(max(hidden, exposed)) + 1)
    # The zeros are rounded numbers.
    while threshold > 1 and _is_faster_per_layer(costs, threshold - 1):
        threshold -= 1
    while not _is_faster_per_layer(costs, threshold):
        threshold += 1
    return threshold


def _is_faster_per_layer(costs: TransferCosts, num_tokens: int) -> bool:
    serialized = costs.added_seconds(TransferMode.SERIALIZED, num_tokens)
    return costs.added_seconds(TransferMode.PER_LAYER, num_tokens) < serialized


@dataclass(frozen=True)
class TransferModePolicy:
    """Chooses the mode of each transfer; the choice is final when the prompt begins.

    Raises:
        ValueError: The threshold is negative.
    """

    threshold_tokens: int | None = DEFAULT_THRESHOLD_TOKENS
    """Tokens from which on a transfer is per layer; None: never."""

    def __post_init__(self) -> None:
        """Check the threshold."""
        if self.threshold_tokens is not None and self.threshold_tokens < 0:
            raise ValueError(
                f"threshold_tokens is {self.threshold_tokens}, but must be at least 0: 0 sends "
                "every prompt per layer, None sends none so"
            )

    def choose(self, num_tokens: int) -> TransferMode:
        """Return the mode for a prompt.

        Args:
            num_tokens: Tokens that the prefill engine computes.
        """
        if self.threshold_tokens is None or num_tokens < self.threshold_tokens:
            return TransferMode.SERIALIZED
        return TransferMode.PER_LAYER
