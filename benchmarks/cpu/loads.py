"""Loads for the servers: cells of requests, the same for every server.

Prompts are words of the model's tokenizer. No two are alike, so that no prefix cache helps, and a
server that accepts only text tokenizes them into the same ids.
"""

from dataclasses import replace
from typing import NamedTuple

from benchmarks.cpu.model import FIRST_WORD, VOCABULARY, word
from benchmarks.cpu.options import CompareConfig
from benchmarks.cpu.peers import Server
from gllm.commands.bench.client import request_body
from gllm.commands.bench.load import PlannedRequest, plan_load
from gllm.commands.bench.options import LoadConfig, ServeConfig

LENGTH_SCALE = 1 / 8
"""Factor on the traces' lengths that keeps the run time on a CPU acceptable."""
AT_ONCE = 32
"""Requests of a trace that are all sent at the beginning."""
LONGEST = 2048
"""Maximum tokens per request; no scaled request of a trace is longer."""


class Cell(NamedTuple):
    """A load and its name in the tables."""

    name: str
    config: ServeConfig


def streams_name(streams: int) -> str:
    """Return the cell's name for this many requests at once."""
    return "1 stream" if streams == 1 else f"{streams} streams"


def rate_name(rate: float) -> str:
    """Return the cell's name for Poisson arrivals at this rate."""
    return f"{rate:.3g} requests/s"


def trace_name(trace: str) -> str:
    """Return the cell's name for a trace's lengths, all requests sent at once."""
    return f"{trace} / 8, {AT_ONCE} at once"


TRACES = ("azure-conv", "azure-code")
RATE_TRACE = TRACES[0]


def equal_cell(config: CompareConfig, streams: int, seed: int) -> Cell:
    """Return a cell of requests of equal lengths, all sent at once."""
    load = LoadConfig(f"fixed:{config.prompt},{config.new}", num_prompts=streams, seed=seed)
    return Cell(streams_name(streams), ServeConfig(load=load))


def trace_cell(trace: str, seed: int) -> Cell:
    """Return a cell of requests with a trace's lengths, all sent at once."""
    return Cell(trace_name(trace), ServeConfig(load=_trace(trace, AT_ONCE, seed)))


def rate_cell(rate: float, count: int, seed: int) -> Cell:
    """Return a cell with RATE_TRACE's lengths and Poisson arrivals, `rate` requests per second."""
    load = _trace(RATE_TRACE, count, seed)
    return Cell(rate_name(rate), ServeConfig(load=load, request_rate=rate))


def _trace(trace: str, count: int, seed: int) -> LoadConfig:
    return LoadConfig(trace, count, scale_length=LENGTH_SCALE, max_length=LONGEST, seed=seed)


def requests_of(cell: Cell, server: Server, model: str) -> tuple[list[PlannedRequest], list[bytes]]:
    """Return the cell's requests in order of arrival, and their JSON bodies for this server."""
    config = replace(
        cell.config, ignore_eos=server.ignores_eos, extra_body=server.extra_body, progress=False
    )
    load = [_in_words(each, server) for each in plan_load(config, VOCABULARY - FIRST_WORD)]
    return load, [request_body(config, model, *each) for each in enumerate(load)]


def _in_words(planned: PlannedRequest, server: Server) -> PlannedRequest:
    """Return the same request with token ids of words, or with the words."""
    ids = [FIRST_WORD + each for each in planned.prompt if isinstance(each, int)]
    return planned._replace(prompt=ids if server.takes_ids else "".join(map(word, ids)))
