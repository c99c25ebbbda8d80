"""Windows of attention: the tokens of its sequence that a token sees, besides the causal mask."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """Window that begins at the last multiple of `size` tokens, up to the token itself.

    Source: Meta, "The Llama 4 herd" (2025), where it is called chunked attention.
    """

    size: int


AttentionWindow = int | AttentionChunk | None
"""Number of latest tokens that a token sees, itself included (sliding window); the tokens of its
chunk; or None for all."""


def max_visible(window: AttentionWindow) -> int | None:
    """Return the largest number of tokens that a token sees; None without a limit."""
    return window.size if isinstance(window, AttentionChunk) else window


def encode_window(window: AttentionWindow) -> int:
    """Return the number that kernels get: that of a sliding window, -size for chunks, 0 for all."""
    return -window.size if isinstance(window, AttentionChunk) else window or 0
