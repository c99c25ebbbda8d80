"""What the benchmarks can be told, as fields with flags.

Owns defaults, ranges and the reading of values from the command line. Knows nothing of how a
benchmark is run.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gllm.config.field_types import convert_fields
from gllm.config.flags import output_file, output_folder, parse_url
from gllm.config.options import INT32_MAX, MAX_TIMEOUT_SECONDS, option

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
    """Return numbers from '50,99.9'. Raises ValueError."""
    return tuple(float(part) for part in text.split(","))


def parse_metrics(text: str) -> tuple[str, ...]:
    """Names of METRICS from 'ttft,tpot'. Raises ValueError."""
    names = tuple(text.split(","))
    if not set(names) <= set(METRICS):
        raise ValueError(f"{text} has a name that is none of {', '.join(METRICS)}")
    return names


def parse_slo(text: str) -> tuple[str, float]:
    """A latency and its limit in milliseconds from 'ttft:200'. Raises ValueError."""
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el") or not 0 < float(limit or 0) < math.inf:
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
    num_prompts: int = option(
        1000, "how many requests; of a file or a replay, at most", ge=1, le=INT32_MAX
    )
    scale_length: float = option(1.0, "multiplies prompt and output lengths", gt=0, le=1e6)
    max_length: int | None = option(
        None,
        "longest prompt + output; longer requests are cut; default: as they are",
        ge=2,
        le=INT32_MAX,
    )
    seed: int = option(
        0,
        "of lengths, arrivals, prompts and, above temperature 0, sampling",
        ge=0,
        le=2**63 - 1,
    )

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the fix."""
        convert_fields(self)


@dataclass(frozen=True)
class ServeConfig:
    """A server, the load on it, and what is told of it."""

    base_url: str = option("http://127.0.0.1:8000", "the server", parse=parse_url)
    endpoint: str = option("/v1/completions", "what is asked of it", choices=ENDPOINTS)
    model: str | None = option(None, "the model's name; default: asked of /v1/models")
    api_key: str | None = option(None, "sent as a bearer token; default: $OPENAI_API_KEY")
    load: LoadConfig = field(default_factory=LoadConfig)
    request_rate: float = option(
        math.inf, "requests a second; inf: all at once (default inf)", gt=0, allows_inf=True
    )
    burstiness: float = option(
        1.0, "shape of the gamma-distributed gaps; 1: Poisson; less: bursts", gt=0, le=1e9
    )
    arrivals: str | None = option(
        None,
        "burst:SIZE, so many together at equal distances; or replay, the times of a trace or file; "
        "default: by --request-rate and --burstiness",
    )
    scale_time: float = option(1.0, "multiplies the times of arrival", ge=0, le=1e9)
    max_concurrency: int | None = option(
        None, "most requests under way; default: no limit", ge=1, le=INT32_MAX
    )
    prompt_kind: str = option(
        "auto", "made-up prompts; auto: ids for completions, text for chat", choices=PROMPT_KINDS
    )
    vocab_size: int | None = option(
        None,
        "ids of prompts are below it; default: vocab_size of /v1/models, else 256",
        ge=1,
        le=INT32_MAX,
    )
    temperature: float = option(0.0, "of sampling", ge=0, le=2)
    ignore_eos: bool = option(True, "ask for outputs of exactly the planned length")
    extra_body: Mapping[str, Any] | None = option(
        None, "JSON object with more fields of every request", parse=parse_json_object
    )
    num_warmups: int = option(
        1, "requests before the measurement, one after the other", ge=0, le=INT32_MAX
    )
    ready_timeout: float = option(
        60.0, "seconds in which the server has to be ready", gt=0, le=MAX_TIMEOUT_SECONDS
    )
    request_timeout: float = option(
        3600.0, "seconds after which a request has failed", gt=0, le=MAX_TIMEOUT_SECONDS
    )
    percentile_metrics: tuple[str, ...] = option(
        METRICS,
        "latencies to print (default ttft,tpot,itl,e2el)",
        parse=parse_metrics,
    )
    metric_percentiles: tuple[float, ...] = option(
        (99.0,),
        "their percentiles, as 50,99 (default 99)",
        ge=0,
        le=100,
        parse=parse_percentiles,
    )
    save_result: str | None = option(None, "JSON file for the result", parse=output_file)
    result_dir: str | None = option(
        None, "folder for the result, under a name made of the load", parse=output_folder
    )
    save_detailed: bool = option(False, "every request's figures in the JSON, too")
    plot: str | None = option(None, "folder for plots", parse=output_folder)
    progress: bool = option(True, "show a bar while it runs")

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the fix."""
        convert_fields(self)
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url is {self.base_url}, but has to begin with http:// or https://"
            )
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
