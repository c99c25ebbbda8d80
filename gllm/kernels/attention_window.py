"""Windows of attention: the tokens of its sequence that a token sees, besides the causal mask."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """Window that begins at the last multiple of `size` tokens, up to the token itself.

    Source: Meta, "The Llama 4 herd" (2025), where it is called chunked attention.
    """

    size: int


@dataclass(frozen=True, slots=True)
class SymmetricWindow:
    """Window without a causal mask: a token sees those before and those behind it.

    All tokens of a sequence are computed in one step then. For models that embed whole texts.
    """

    size: int | None
    """Tokens on each side, the token itself included; None for all of the sequence."""


AttentionWindow = int | AttentionChunk | SymmetricWindow | None
"""Number of latest tokens that a token sees, itself included (sliding window); the tokens of its
chunk; those on both sides; or None for all up to itself."""


def max_visible(window: AttentionWindow) -> int | None:
    """Return the largest number of tokens that a token sees; None without a limit."""
    if isinstance(window, SymmetricWindow):
        return None if window.size is None else 2 * window.size - 1
    return window.size if isinstance(window, AttentionChunk) else window


def encode_window(window: AttentionWindow) -> int:
    """Return the number that kernels get: that of a sliding window, -size for chunks, 0 for all.

    Kernels have no symmetric windows.
    """
    assert not isinstance(window, SymmetricWindow), "the backend refuses symmetric windows"
    return -window.size if isinstance(window, AttentionChunk) else window or 0
