"""Physical limits of a link: the least time for a step, and the most tokens per second."""

from typing import NamedTuple

from benchmarks.net.rig import MTU

HEADER_BYTES = 52
"""IP and TCP headers of a packet, with timestamps."""
MEGABIT = 1e6


class WeakLink(NamedTuple):
    """Rate and delay of one direction of a hop."""

    megabits: float
    """Mbit/s."""
    delay_ms: float
    """One-way delay."""

    @property
    def bits_per_second(self) -> float:
        """Rate at which packets, headers included, are sent."""
        return self.megabits * MEGABIT

    @property
    def delay_seconds(self) -> float:
        """One-way delay."""
        return self.delay_ms / 1e3

    @property
    def bytes_per_second(self) -> float:
        """Most payload of TCP per second."""
        return self.bits_per_second / 8 * (MTU - HEADER_BYTES) / MTU

    def sending_seconds(self, num_bytes: int) -> float:
        """Return the time for which bytes occupy the link."""
        return num_bytes / self.bytes_per_second

    def floor_seconds(self, num_bytes: int) -> float:
        """Return the least time from the send to the arrival of the last byte."""
        return self.sending_seconds(num_bytes) + self.delay_seconds

    def __str__(self) -> str:
        return f"{self.megabits:g} Mbit/s, {self.delay_ms:g} ms"


def token_floor_seconds(
    link: WeakLink, num_stages: int, token_bytes: int, step_seconds: float
) -> float:
    """Return the least time per output token of a lone stream.

    Args:
        link: between all machines, one stage on each.
        num_stages: number of stages; the driver is beside the first one.
        token_bytes: bytes per token between two stages.
        step_seconds: least time of a stage's step.
    """
    edges = (num_stages - 1) * link.floor_seconds(token_bytes)
    return edges + link.delay_seconds + num_stages * step_seconds


def most_tokens_per_second(
    link: WeakLink, num_streams: int, floor_seconds: float, token_bytes: int, prompt_tokens: float
) -> float:
    """Return the most output tokens per second of all streams together.

    Args:
        link: between all machines.
        num_streams: number of streams.
        floor_seconds: `token_floor_seconds`.
        token_bytes: bytes per token between two stages.
        prompt_tokens: tokens of arriving prompts per second, which the links carry too.
    """
    carried = link.bytes_per_second / token_bytes - prompt_tokens
    return max(0.0, min(num_streams / floor_seconds, carried))
