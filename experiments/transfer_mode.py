"""Decision whether KV cache is transferred after the prompt or layer by layer during it.

A per-layer transfer hides behind the computation of the next layers, but costs the sender and the
link something per layer, so short prompts are sent serialized. All functions are pure.

Source: "Splitwise" (ISCA'24, arXiv 2311.18677), section IV-C.
"""

from dataclasses import dataclass
from enum import Enum

from gllm.scheduler.config import DEFAULT_THRESHOLD_TOKENS


class TransferMode(Enum):
    """Time at which the layers of a KV cache are sent."""

    SERIALIZED = "serialized"
    """All layers after the prompt."""
    PER_LAYER = "per-layer"
    """Each layer once it is computed."""


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
