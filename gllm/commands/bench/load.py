"""Plan the load: arrival times, lengths and prompts of all requests, or read them from a file.

The same seed gives the same load. Synthetic prompts are random, so a prefix cache helps only with
conversations.
"""

import csv
import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from gllm.commands.bench.options import LoadConfig, ServeConfig
from gllm.sim.workloads.classes import parse_priorities, sample_labels
from gllm.sim.workloads.lengths import sample_lengths
from gllm.sim.workloads.requests import (
    WorkloadRequest,
    make_workload,
    sample_arrival_times,
    scale_request,
)
from gllm.sim.workloads.sessions import PromptPart, is_sessions, sample_turns

SUFFIXES = (".jsonl", ".csv")


class TraceRow(NamedTuple):
    """Request in a workload file or trace: prompt, output length, arrival time and conversation."""

    prompt: int | str | list[int] | tuple[PromptPart, ...]
    """Number of tokens, text, token ids, or parts that other prompts share."""
    output: int
    """Number of output tokens."""
    arrival: float | None = None
    """Seconds since the start of the trace."""
    session: str = ""
    """Conversation of the request; empty for none."""


def read_rows(path: str) -> list[TraceRow]:
    """Read the requests of a workload file (.jsonl or .csv), one per row.

    Columns: `prompt` (text, or in JSON a list of token ids) or `prompt_tokens` (length of a random
    prompt); `output_tokens`; optionally `arrival_s` in seconds and `session`.

    Raises:
        ValueError: a row is invalid; the message names its number and the problem.
        OSError: the file cannot be read.
    """
    with Path(path).open(encoding="utf-8", newline="") as lines:
        rows: Iterable[Any] = csv.DictReader(lines) if path.endswith(".csv") else _objects(lines)
        read = []
        try:
            for row in rows:
                read.append(_row(row))
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{path}, request {len(read) + 1}: {error!r}: a row needs prompt or prompt_tokens, "
                "output_tokens, and for a replay arrival_s"
            ) from None
    if not read:
        raise ValueError(f"{path} has no requests")
    return read


def _objects(lines: Iterable[str]) -> Iterable[Any]:
    return (json.loads(line) for line in lines if line.strip())


def _row(row: Any) -> TraceRow:
    if not isinstance(row, dict):
        raise ValueError("not an object")
    prompt = row["prompt"] if row.get("prompt") else int(row["prompt_tokens"])
    if not isinstance(prompt, int | str | list):
        raise ValueError("prompt is neither text nor a list of ids")
    output = int(row["output_tokens"])
    arrival = row.get("arrival_s")
    if output < 1 or (isinstance(prompt, int) and prompt < 1):
        raise ValueError("a length below 1")
    session = str(row.get("session") or "")
    return TraceRow(prompt, output, None if arrival in (None, "") else float(arrival), session)


WORDS = [
    "about", "after", "again", "air", "all", "along", "animal", "another", "answer", "any",
    "around", "ask", "away", "back", "because", "been", "before", "below", "between", "big",
    "book", "boy", "build", "call", "can", "car", "change", "city", "close", "come", "could",
    "country", "cut", "day", "different", "door", "down", "each", "early", "earth", "end",
    "even", "every", "eye", "face", "family", "far", "father", "few", "find", "first",
]  # fmt: skip
"""Words that are one token each in most vocabularies."""


class PlannedRequest(NamedTuple):
    """Request that `gllm bench serve` will send: arrival time, prompt and output length."""

    arrival: float
    """Seconds since the first request."""
    prompt: str | list[int] | list[dict[str, str]]
    """Text, token ids, or the messages of a chat."""
    prompt_tokens: int
    """Number of token ids, or of words: the model's tokenizer is not available here."""
    output_tokens: int
    session: str = ""
    """Conversation of the request; empty for none."""
    priority: int | None = None
    """Priority that is sent with the request; None for the server's default."""


def plan_load(config: ServeConfig, vocab_size: int) -> list[PlannedRequest]:
    """Return the requests that `gllm bench serve` will send, in order of arrival.

    Args:
        config: options of the command.
        vocab_size: random prompts have token ids below it.

    Raises:
        ValueError: the workload, the arrivals, the priorities or the file is invalid.
        OSError: the file cannot be read.
    """
    is_replay = config.arrivals == "replay"
    rows = _rows(config.load, is_replay)
    times = [row.arrival for row in rows] if is_replay else _arrivals(config, len(rows))
    rng = random.Random(config.load.seed + 2)
    requests = []
    for row, time, priority in zip(rows, times, _priorities(config, rows), strict=True):
        if time is None:
            raise ValueError(f"{config.load.workload} has no arrival_s to replay in some rows")
        prompt_vocab_size = None if config.text_prompts else vocab_size
        if isinstance(row.prompt, tuple):
            prompt = _join_parts(row.prompt, config.load.seed, prompt_vocab_size)
        else:
            prompt = make_prompt(row.prompt, rng, prompt_vocab_size)
        if config.chat and not isinstance(prompt, str):
            raise ValueError(f"{config.load.workload}: chat takes text, but a prompt is token ids")
        length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        requests.append(
            PlannedRequest(
                time * config.scale_time, prompt, length, row.output, row.session, priority
            )
        )
    begin = min(request.arrival for request in requests)
    requests = [request._replace(arrival=request.arrival - begin) for request in requests]
    return sorted(requests, key=lambda request: request.arrival)


def warmup_requests(
    config: ServeConfig, load: list[PlannedRequest], vocab_size: int
) -> list[PlannedRequest]:
    """Return requests as long as the first ones of the load, with other random prompts."""
    rng = random.Random(config.load.seed + 3)
    prompt_vocab_size = None if config.text_prompts else vocab_size
    return [
        planned._replace(
            prompt=make_prompt(planned.prompt_tokens, rng, prompt_vocab_size), session=""
        )
        for planned in load[: config.num_warmups]
    ]


def jobs_of(config: LoadConfig) -> list[WorkloadRequest]:
    """Return requests with the prompt and output lengths of a workload, which all arrive at once.

    Raises:
        ValueError: the workload is invalid, or contains prompts instead of their lengths.
        OSError: the workload's file cannot be read.
    """
    jobs = []
    for row in _rows(config, replay=False):
        if not isinstance(row.prompt, int):
            raise ValueError(f"{config.workload} has prompts: only `gllm bench serve` sends them")
        jobs.append(WorkloadRequest(0.0, row.prompt, row.output))
    return jobs


def _rows(config: LoadConfig, replay: bool) -> list[TraceRow]:
    """Return requests from a file, a trace or a distribution, their lengths scaled and limited."""
    if config.workload.endswith(SUFFIXES):
        rows = read_rows(config.workload)[: config.num_prompts]
    elif replay:
        jobs = make_workload(config.workload, config.num_prompts, arrivals="replay")
        rows = [
            TraceRow(job.num_prompt_tokens, job.num_output_tokens, job.arrival_seconds)
            for job in jobs
        ]
    elif is_sessions(config.workload):
        turns = sample_turns(config.workload, config.num_prompts, config.seed)
        rows = [
            TraceRow(turn.parts, turn.num_output_tokens, session=str(turn.session))
            for turn in turns
        ]
    else:
        lengths = sample_lengths(config.workload, config.num_prompts, config.seed)
        rows = [TraceRow(*pair) for pair in lengths]
    return [_scaled(row, config) for row in rows]


def _scaled(row: TraceRow, config: LoadConfig) -> TraceRow:
    if isinstance(row.prompt, str | list):
        return row
    parts = row.prompt if isinstance(row.prompt, tuple) else ()
    length = row.prompt if isinstance(row.prompt, int) else 0
    job = scale_request(
        WorkloadRequest(0.0, length, row.output, parts), config.scale_length, config.max_length
    )
    return row._replace(prompt=job.parts or job.num_prompt_tokens, output=job.num_output_tokens)


def _arrivals(config: ServeConfig, count: int) -> list[float]:
    """Return arrival times by rate and burstiness, or in bursts."""
    rate = config.request_rate
    if config.arrivals is None and math.isinf(rate):
        return [0.0] * count
    # sample_arrival_times takes the coefficient of variation of the gamma distribution.
    kind = config.arrivals or f"gamma:{config.burstiness**-0.5}"
    return sample_arrival_times(kind, count, rate, config.load.seed)


def _priorities(config: ServeConfig, rows: list[TraceRow]) -> list[int] | list[None]:
    """Return the priority of each request, the same in a conversation; None without shares."""
    if config.priorities is None:
        return [None] * len(rows)
    owners = [row.session or index for index, row in enumerate(rows)]
    shares = parse_priorities(config.priorities)
    return sample_labels(owners, shares, f"priorities {config.load.seed}")


def make_prompt(
    prompt: int | str | list[int], rng: random.Random, vocab_size: int | None
) -> str | list[int]:
    """Return a given prompt, or a random one of that many ids below vocab_size, or of words.

    Args:
        prompt: Number of tokens, or the prompt itself.
        rng: Random number generator.
        vocab_size: Number of token ids; None for words.
    """
    if not isinstance(prompt, int):
        return prompt
    if vocab_size is None:
        return " ".join(rng.choices(WORDS, k=prompt))
    return rng.choices(range(vocab_size), k=prompt)


def _join_parts(
    parts: tuple[PromptPart, ...], seed: int, vocab_size: int | None
) -> str | list[int]:
    """Return a prompt of random ids or words in which equal parts are equal."""
    drawn = [
        make_prompt(part.num_tokens, random.Random(f"{seed} {part.key}"), vocab_size)
        for part in parts
    ]
    if vocab_size is None:
        return " ".join(map(str, drawn))
    return [token_id for part in drawn for token_id in part if isinstance(token_id, int)]
