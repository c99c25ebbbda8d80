"""Options of the comparison: fields with flags, defaults and ranges."""

import math
from dataclasses import dataclass

from gllm.options.flags import parse_bytes
from gllm.options.options import option

MODES = ("server", "poisson", "in-process", "four-bit", "hybrid", "docs")


def parse_names(text: str) -> tuple[str, ...]:
    """Parse comma-separated names."""
    return tuple(name.strip() for name in text.split(","))


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse comma-separated integers.

    Raises:
        ValueError: A part is not an integer.
    """
    return tuple(int(part) for part in text.split(","))


def parse_rates(text: str) -> tuple[float, ...]:
    """Parse comma-separated numbers.

    Raises:
        ValueError: A part is not a number.
    """
    return tuple(float(part) for part in text.split(","))


@dataclass(frozen=True)
class CompareConfig:
    """Peers, loads and number of rounds of a comparison."""

    mode: str = option(
        "server",
        "server: equal requests, some streams at once; poisson: lengths of traces, at once and at "
        "rising rates; in-process: engines without HTTP; four-bit: in process with weights of 4 "
        "bits; hybrid: in process, models with recurrent layers; docs: a page of saved results",
        choices=MODES,
    )
    peers: tuple[str, ...] | None = option(
        None,
        "names of the table in peers.py, as gllm,vllm; default: all peers of the mode",
        parse=parse_names,
    )
    streams: tuple[int, ...] = option(
        (1, 4, 16), "requests at once, and batches in process (default 1,4,16)", parse=parse_counts
    )
    rounds: int = option(3, "number of rounds; every peer is restarted in each")
    repeats: int = option(3, "times that each load is sent, or each batch run, per round")
    rates: tuple[float, ...] | None = option(
        None,
        "requests per second of Poisson arrivals, as 0.5,1,2; default: shares of the throughput of "
        "the best other server with all requests sent at once",
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
        """Check the ranges.

        Raises:
            ValueError: A field is out of range; the message names the field and the fix.
        """
        for name in ("rounds", "repeats", "requests", "prompt", "threads", "kv_cache_memory"):
            self._at_least(name, (getattr(self, name),), 1)
        # Prefill produces the first output token; a decode needs a second one.
        self._at_least("new", (self.new,), 2)
        self._at_least("streams", self.streams, 1)
        self._at_least("prefills", self.prefills, 1)
        if self.rates is not None and not all(0 < rate < math.inf for rate in self.rates):
            raise ValueError(f"rates are {self.rates}, but must be above 0")

    @staticmethod
    def _at_least(name: str, values: tuple[int, ...], least: int) -> None:
        if min(values) < least:
            raise ValueError(f"{name} is {min(values)}, but must be at least {least}")
