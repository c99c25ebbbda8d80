"""The load: when which request is sent, and what it says.

Owns arrivals, lengths and the content of made-up prompts. Knows nothing of servers. The same seed
gives the same load; each made-up prompt is drawn anew, so that no prefix cache helps with it.
"""

import math
import random
from typing import NamedTuple

from gllm.commands.bench.options import LoadConfig, ServeConfig
from gllm.commands.bench.trace_file import SUFFIXES, Row, read_rows
from gllm.sim.workload import Job, draw_arrivals, draw_lengths, make_jobs, scaled

WORDS = [
    *("about", "after", "again", "air", "all", "along", "animal", "another", "answer", "any"),
    *("around", "ask", "away", "back", "because", "been", "before", "below", "between", "big"),
    *("book", "boy", "build", "call", "can", "car", "change", "city", "close", "come", "could"),
    *("country", "cut", "day", "different", "door", "down", "each", "early", "earth", "end"),
    *("even", "every", "eye", "face", "family", "far", "father", "few", "find", "first"),
]
"""Words that are one token each in most vocabularies: so many words are about so many tokens."""


class Planned(NamedTuple):
    """A request to be sent."""

    arrival: float
    """Seconds from the first request's."""
    prompt: str | list[int]
    prompt_tokens: int
    """As far as can be told without the model's tokenizer: words of a text."""
    output_tokens: int


def planned_load(config: ServeConfig, vocab_size: int) -> list[Planned]:
    """The requests, in order of their arrivals.

    Raises ValueError where workload, arrivals or file cannot be; OSError as open does.
    """
    replay = config.arrivals == "replay"
    rows = _rows(config.load, replay)
    times = [row.arrival for row in rows] if replay else _arrivals(config, len(rows))
    rng = random.Random(config.load.seed + 2)
    load = []
    for row, time in zip(rows, times, strict=True):
        if time is None:
            raise ValueError(f"{config.load.workload} has no arrival_s to replay in some rows")
        prompt = _content(row.prompt, rng, None if config.text_prompts else vocab_size)
        if config.chat and not isinstance(prompt, str):
            raise ValueError(f"{config.load.workload}: chat takes text, but a prompt is token ids")
        length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        load.append(Planned(time * config.scale_time, prompt, length, row.output))
    begin = min(planned.arrival for planned in load)
    load = [planned._replace(arrival=planned.arrival - begin) for planned in load]
    return sorted(load, key=lambda planned: planned.arrival)


def warm_ups(config: ServeConfig, load: list[Planned], vocab_size: int) -> list[Planned]:
    """Requests as long as the load's first ones, but with prompts of their own."""
    rng = random.Random(config.load.seed + 3)
    ids = None if config.text_prompts else vocab_size
    return [
        planned._replace(prompt=_content(planned.prompt_tokens, rng, ids))
        for planned in load[: config.num_warmups]
    ]


def jobs_of(config: LoadConfig) -> list[Job]:
    """The requests' lengths, all there at once.

    Raises ValueError where the workload cannot be or has prompts of its own; OSError as open does.
    """
    jobs = []
    for row in _rows(config, replay=False):
        if not isinstance(row.prompt, int):
            raise ValueError(f"{config.workload} has prompts: only `gllm bench serve` takes those")
        jobs.append(Job(0.0, row.prompt, row.output))
    return jobs


def _rows(config: LoadConfig, replay: bool) -> list[Row]:
    """Requests as they were written down or drawn; lengths scaled and cut, given prompts not."""
    if config.workload.endswith(SUFFIXES):
        rows = read_rows(config.workload)[: config.num_prompts]
    elif replay:
        jobs = make_jobs(config.workload, config.num_prompts, arrivals="replay")
        rows = [Row(job.prompt, job.output, job.arrival) for job in jobs]
    else:
        lengths = draw_lengths(config.workload, config.num_prompts, config.seed)
        rows = [Row(*pair) for pair in lengths]
    return [_scaled(row, config) for row in rows]


def _scaled(row: Row, config: LoadConfig) -> Row:
    if not isinstance(row.prompt, int):
        return row
    job = scaled(Job(0.0, row.prompt, row.output), config.scale_length, config.max_length)
    return Row(job.prompt, job.output, row.arrival)


def _arrivals(config: ServeConfig, count: int) -> list[float]:
    """Times by rate and burstiness, or in bursts."""
    rate = config.request_rate
    if config.arrivals is None and math.isinf(rate):
        return [0.0] * count
    # The gaps' coefficient of variation is what the gamma distribution is known by there.
    kind = config.arrivals or f"gamma:{config.burstiness**-0.5}"
    return draw_arrivals(kind, count, rate, config.load.seed)


def _content(prompt: int | str | list[int], rng: random.Random, ids: int | None) -> str | list[int]:
    """A prompt as it is, or one of so many tokens: ids below `ids`, or words where it is None."""
    if not isinstance(prompt, int):
        return prompt
    if ids is None:
        return " ".join(rng.choices(WORDS, k=prompt))
    return rng.choices(range(ids), k=prompt)
