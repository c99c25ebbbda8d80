"""What the comparison can be told, as fields with flags.

Owns defaults, ranges and the reading of values from the command line. Knows nothing of how things
are measured.
"""

import math
from dataclasses import dataclass

from gllm.config.flags import parse_bytes
from gllm.config.options import option

MODES = ("server", "poisson", "in-process", "docs")


def parse_names(text: str) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name.strip() for name in text.split(","))


def parse_counts(text: str) -> tuple[int, ...]:
    """Whole numbers between commas. Raises ValueError."""
    return tuple(int(part) for part in text.split(","))


def parse_rates(text: str) -> tuple[float, ...]:
    """Numbers between commas. Raises ValueError."""
    return tuple(float(part) for part in text.split(","))


@dataclass(frozen=True)
class CompareConfig:
    """What is measured, of whom, how often."""

    mode: str = option(
        "server",
        "server: equal requests, some streams at once; poisson: lengths of traces, at once and at "
        "rising rates; in-process: engines without HTTP; docs: the page of what was measured",
        choices=MODES,
    )
    peers: tuple[str, ...] | None = option(
        None, "of the table in peers.py, as gllm,vllm; default: all of the mode", parse=parse_names
    )
    streams: tuple[int, ...] = option(
        (1, 4, 16), "requests at once, and batches in process (default 1,4,16)", parse=parse_counts
    )
    rounds: int = option(3, "how often every peer is started afresh")
    repeats: int = option(3, "how often each load is sent, or each batch run, in a round")
    rates: tuple[float, ...] | None = option(
        None,
        "requests a second of Poisson arrivals, as 0.5,1,2; default: shares of what the best "
        "other server does with all requests there at once",
        parse=parse_rates,
    )
    requests: int = option(32, "requests at each rate of Poisson arrivals")
    prompt: int = option(128, "prompt tokens")
    new: int = option(64, "output tokens")
    prefills: tuple[int, ...] = option(
        (512, 2048), "prompts prefilled alone, in process (default 512,2048)", parse=parse_counts
    )
    threads: int = option(2, "compute threads of each peer")
    kv_cache_memory: int = option(2**30, "KV cache of each peer, as 1GiB", parse=parse_bytes)
    work: str = option(
        "build/cpu-compare", "folder for the model, the environments and the results"
    )
    llama_bin: str | None = option(
        None, "folder with llama-server and llama-batched-bench; default: built from PyPI's sources"
    )

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the fix."""
        for name in ("rounds", "repeats", "requests", "prompt", "threads", "kv_cache_memory"):
            self._at_least(name, (getattr(self, name),), 1)
        # The first token of an output is prefill's: decode needs one behind it.
        self._at_least("new", (self.new,), 2)
        self._at_least("streams", self.streams, 1)
        self._at_least("prefills", self.prefills, 1)
        if self.rates is not None and not all(0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"rates are {self.rates}, but have to be above 0")

    @staticmethod
    def _at_least(name: str, values: tuple[int, ...], least: int) -> None:
        if min(values) < least:
            raise ValueError(f"{name} is {min(values)}, but has to be at least {least}")
