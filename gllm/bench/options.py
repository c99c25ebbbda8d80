"""What the benchmarks can be told, as fields with flags.

Owns defaults, ranges and the reading of values from the command line. Knows nothing of how a
benchmark is run.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gllm.scheduler.config import option

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
METRICS = ("ttft", "tpot", "itl", "e2el")
PROMPT_KINDS = ("auto", "ids", "text")


def parse_json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ValueError."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text} is no JSON object")
    return value


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Numbers in 0..100 from '50,99.9'. Raises ValueError."""
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"{text} has a percentile outside of 0..100")
    return values


def parse_metrics(text: str) -> tuple[str, ...]:
    """Names of METRICS from 'ttft,tpot'. Raises ValueError."""
    names = tuple(text.split(","))
    if not set(names) <= set(METRICS):
        raise ValueError(f"{text} has a name that is none of {', '.join(METRICS)}")
    return names


def parse_slo(text: str) -> tuple[str, float]:
    """A latency and its limit in milliseconds from 'ttft:200'. Raises ValueError."""
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or not float(limit or 0) > 0:
        raise ValueError(f"{text} is not as ttft:200, tpot:50 or e2el:3000")
    return name, float(limit)


@dataclass(frozen=True)
class LoadConfig:
    """Which requests."""

    workload: str = option(
        "uniform:16,512,16,128",
        "azure-conv, azure-code, sharegpt-like, arxiv-4k, mixed; or numbers for the prompt's "
        "length, then the output's: fixed:512,128, uniform:LOW,HIGH,LOW,HIGH, "
        "lognormal:MEDIAN,P90,MOST,MEDIAN,P90,MOST, zipf:EXPONENT,MOST,EXPONENT,MOST; or a file, "
        ".jsonl or .csv, with a request in each row (default uniform:16,512,16,128)",
    )
    num_prompts: int = option(1000, "how many requests; of a file or a replay, at most")
    scale_length: float = option(1.0, "multiplies prompt and output lengths")
    max_length: int | None = option(
        None, "longest prompt + output; longer requests are cut; default: as they are"
    )
    seed: int = option(0, "of lengths, arrivals, prompts and, above temperature 0, sampling")

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the fix."""
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts is {self.num_prompts}, but has to be at least 1")
        if not 0 < self.scale_length < math.inf:
            raise ValueError(f"scale_length is {self.scale_length}, but has to be above 0")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}, but has to be at least 2")


@dataclass(frozen=True)
class ServeConfig:
    """A server, the load on it, and what is told of it."""

    base_url: str = option("http://127.0.0.1:8000", "the server")
    endpoint: str = option("/v1/completions", "what is asked of it", choices=ENDPOINTS)
    model: str | None = option(None, "the model's name; default: asked of /v1/models")
    api_key: str | None = option(None, "sent as a bearer token; default: $OPENAI_API_KEY")
    load: LoadConfig = field(default_factory=LoadConfig)
    request_rate: float = option(math.inf, "requests a second; inf: all at once (default inf)")
    burstiness: float = option(1.0, "shape of the gamma-distributed gaps; 1: Poisson; less: bursts")
    arrivals: str | None = option(
        None,
        "burst:SIZE, so many together at equal distances; or replay, the times of a trace or file; "
        "default: by --request-rate and --burstiness",
    )
    scale_time: float = option(1.0, "multiplies the times of arrival")
    max_concurrency: int | None = option(None, "most requests under way; default: no limit")
    prompt_kind: str = option(
        "auto", "made-up prompts; auto: ids for completions, text for chat", choices=PROMPT_KINDS
    )
    vocab_size: int | None = option(
        None, "ids of prompts are below it; default: vocab_size of /v1/models, else 256"
    )
    temperature: float = option(0.0, "of sampling")
    ignore_eos: bool = option(True, "ask for outputs of exactly the planned length")
    extra_body: Mapping[str, Any] | None = option(
        None, "JSON object with more fields of every request", parse=parse_json_object
    )
    num_warmups: int = option(1, "requests before the measurement, one after the other")
    ready_timeout: float = option(60.0, "seconds in which the server has to be ready")
    request_timeout: float = option(3600.0, "seconds after which a request has failed")
    percentile_metrics: tuple[str, ...] = option(
        METRICS,
        "latencies to print (default ttft,tpot,itl,e2el)",
        parse=parse_metrics,
    )
    metric_percentiles: tuple[float, ...] = option(
        (99.0,), "their percentiles, as 50,99 (default 99)", parse=parse_percentiles
    )
    save_result: str | None = option(None, "JSON file for the result")
    result_dir: str | None = option(None, "folder for the result, under a name made of the load")
    save_detailed: bool = option(False, "every request's figures in the JSON, too")
    plot: str | None = option(None, "folder for plots")
    progress: bool = option(True, "show a bar while it runs")

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the fix."""
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url is {self.base_url}, but has to begin with http:// or https://"
            )
        above_zero = ("request_rate", "burstiness", "ready_timeout", "request_timeout")
        for name in above_zero:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but has to be above 0")
        if not 0 <= self.scale_time < math.inf:
            raise ValueError(f"scale_time is {self.scale_time}, but has to be at least 0")
        for name in ("max_concurrency", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but has to be at least 1")
        if self.num_warmups < 0:
            raise ValueError(f"num_warmups is {self.num_warmups}, but has to be at least 0")
        if self.chat and self.prompt_kind == "ids":
            raise ValueError("prompt_kind ids: chat takes text only")
        if self.arrivals is not None and not self.arrivals.startswith(("burst", "replay")):
            raise ValueError(f"arrivals {self.arrivals!r} is neither burst:SIZE nor replay")

    @property
    def chat(self) -> bool:
        """Whether conversations are sent instead of prompts."""
        return self.endpoint.endswith("/chat/completions")

    @property
    def text_prompts(self) -> bool:
        """Whether made-up prompts are text."""
        return self.prompt_kind == "text" or self.chat
