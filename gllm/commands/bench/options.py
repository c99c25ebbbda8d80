"""Options of the benchmarks, as dataclass fields with flags."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gllm.options.addresses import format_host_port
from gllm.options.field_types import convert_fields
from gllm.options.flags import output_file, output_folder, parse_floats, parse_url
from gllm.options.options import INT32_MAX, MAX_TIMEOUT_SECONDS, option
from gllm.sim.workloads.lengths import WORKLOAD_HELP

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
METRICS = ("ttft", "tpot", "itl", "e2el")
PROMPT_KINDS = ("auto", "ids", "text")


def parse_json_flag(text: str) -> dict[str, Any]:
    """Parse the value of a flag that takes a JSON object.

    Raises:
        ValueError: the text is not a JSON object.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text} is not a JSON object")
    return value


def parse_metric_names(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of latency metrics such as 'ttft,tpot'.

    Raises:
        ValueError: a name is not in METRICS.
    """
    names = tuple(text.split(","))
    if not set(names) <= set(METRICS):
        raise ValueError(f"{text} contains a name other than {', '.join(METRICS)}")
    return names


@dataclass(frozen=True)
class LoadConfig:
    """Options of a benchmark's workload: number and lengths of requests, random seed."""

    workload: str = option(
        "uniform:16,512,16,128",
        f"{WORKLOAD_HELP}; or a file, .jsonl or .csv, with a request in each row "
        "(default uniform:16,512,16,128)",
    )
    num_prompts: int = option(
        1000, "number of requests; with a file or a replay: at most", ge=1, le=INT32_MAX
    )
    scale_length: float = option(1.0, "multiplies prompt and output lengths", gt=0, le=1e6)
    max_length: int | None = option(
        None,
        "longest prompt + output; longer requests are shortened; default: no limit",
        ge=2,
        le=INT32_MAX,
    )
    seed: int = option(
        0,
        "seed of lengths, arrivals, prompts and, above temperature 0, sampling",
        ge=0,
        le=2**63 - 1,
    )

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            ValueError: A field is invalid; the message names the field and the fix.
        """
        convert_fields(self)


@dataclass(frozen=True)
class RequestConfig:
    """Options of a benchmark on a server: the server, and its requests."""

    host: str = option("127.0.0.1", "address of the server")
    port: int = option(8000, "port of the server", ge=1, le=65535)
    base_url: str | None = option(
        None, "URL of the server, in place of host and port", parse=parse_url
    )
    endpoint: str = option("/v1/completions", "endpoint", choices=ENDPOINTS)
    model: str | None = option(None, "model name; default: the first of /v1/models")
    api_key: str | None = option(None, "sent as a bearer token; default: $OPENAI_API_KEY")
    vocab_size: int | None = option(
        None,
        "prompts have ids below it; default: vocab_size of /v1/models, else 256",
        ge=1,
        le=INT32_MAX,
    )
    temperature: float = option(0.0, "sampling temperature", ge=0, le=2)
    ignore_eos: bool = option(True, "request outputs of exactly the planned length")
    extra_body: Mapping[str, Any] | None = option(
        None, "JSON object with additional fields of every request", parse=parse_json_flag
    )
    ready_timeout: float = option(
        60.0, "seconds to wait until the server is ready", gt=0, le=MAX_TIMEOUT_SECONDS
    )
    request_timeout: float = option(
        3600.0, "seconds after which a request fails", gt=0, le=MAX_TIMEOUT_SECONDS
    )

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            ValueError: A field is invalid; the message names the field and the fix.
        """
        convert_fields(self)
        if self.base_url and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url is {self.base_url}, but must start with http:// or https://"
            )

    @property
    def request_seed(self) -> int:
        """Seed of the sampling of the first request; the next ones have the following numbers."""
        return 0

    @property
    def request_fields(self) -> Mapping[str, Any]:
        """Fields of every request that the benchmark needs; `extra_body` overrides them."""
        return {}

    @property
    def server_url(self) -> str:
        """URL of the server."""
        return self.base_url or f"http://{format_host_port(self.host, self.port)}"

    @property
    def chat(self) -> bool:
        """True if requests are sent to the chat endpoint."""
        return self.endpoint.endswith("/chat/completions")


@dataclass(frozen=True)
class ServeConfig(RequestConfig):
    """Options of `gllm bench serve`: server, requests, arrival times and report."""

    load: LoadConfig = field(default_factory=LoadConfig)
    request_rate: float = option(
        math.inf, "requests per second; inf: all at once (default inf)", gt=0, allows_inf=True
    )
    burstiness: float = option(
        1.0, "shape of the gamma distribution of gaps; 1: Poisson; below 1: bursts", gt=0, le=1e9
    )
    arrivals: str | None = option(
        None,
        "burst:SIZE: bursts of SIZE requests at equal intervals; replay: the times of a trace or "
        "file; default: by --request-rate and --burstiness",
    )
    scale_time: float = option(1.0, "multiplies arrival times", ge=0, le=1e9)
    priorities: str | None = option(
        None,
        "shares of the requests with each priority, such as 0:0.9,1:0.1; smaller ones run earlier; "
        "default: requests have none",
    )
    max_concurrency: int | None = option(
        None, "maximum requests in progress; default: no limit", ge=1, le=INT32_MAX
    )
    prompt_kind: str = option(
        "auto", "synthetic prompts; auto: ids for completions, text for chat", choices=PROMPT_KINDS
    )
    num_warmups: int = option(
        1, "requests before the measurement, one at a time", ge=0, le=INT32_MAX
    )
    percentile_metrics: tuple[str, ...] = option(
        METRICS,
        "latencies to print (default ttft,tpot,itl,e2el)",
        parse=parse_metric_names,
    )
    metric_percentiles: tuple[float, ...] = option(
        (99.0,),
        "their percentiles, as 50,99 (default 99)",
        ge=0,
        le=100,
        parse=parse_floats,
    )
    save_result: str | None = option(None, "JSON file for the result", parse=output_file)
    result_dir: str | None = option(
        None, "folder for the result, in a file named after the load", parse=output_folder
    )
    save_detailed: bool = option(False, "also write per-request figures to the JSON file")
    plot: str | None = option(None, "folder for plots", parse=output_folder)
    progress: bool = option(True, "show a progress bar")

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            ValueError: A field is invalid; the message names the field and the fix.
        """
        super().__post_init__()
        if self.chat and self.prompt_kind == "ids":
            raise ValueError("prompt_kind is ids, but chat takes only text: use auto or text")
        if self.arrivals is not None and not self.arrivals.startswith(("burst", "replay")):
            raise ValueError(f"arrivals is {self.arrivals!r}, but must be burst:SIZE or replay")

    @property
    def request_seed(self) -> int:
        """Seed of the load, of which sampling is a part."""
        return self.load.seed

    @property
    def text_prompts(self) -> bool:
        """True if synthetic prompts are text."""
        return self.prompt_kind == "text" or self.chat
