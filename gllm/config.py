"""What a user can set: the engine's configuration, a request's sampling, the server's address.

Owns defaults and ranges; `gllm.flags` derives the command-line flags from the fields. Knows nothing
of models and devices: what depends on them is resolved where they are known.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gllm.field_types import FieldError as FieldError
from gllm.field_types import convert_fields, rule_error
from gllm.flags import add_flags as add_flags
from gllm.flags import from_flags as from_flags
from gllm.flags import input_file, output_file, output_folder, parse_layers
from gllm.flags import parse_bytes as parse_bytes
from gllm.limits import MAX_LOGPROBS as MAX_LOGPROBS
from gllm.limits import check_sampling_sizes
from gllm.logs import FORMATS
from gllm.options import INT32_MAX as INT32_MAX
from gllm.options import INT64_MAX, MAX_SECONDS, bounded, option
from gllm.scheduler.config import SchedulerConfig

MAX_N = 16384
"""Most choices of one request; a server allows fewer (`--max-choices`)."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8")
DEVICES = ("auto", "cpu", "cuda")
TOOL_CALL_PARSERS = (
    *("auto", "none", "deepseek", "glm4", "glm45", "hermes", "llama3", "mistral", "qwen3_coder"),
)
REASONING_PARSERS = ("auto", "none", "think", "mistral")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
ATTENTION_BACKENDS = ("auto", "flash-attn", "native", "torch", "triton")


@dataclass(frozen=True)
class EngineConfig:
    """One pipeline: model, cut, memory, scheduler."""

    model: str = option(
        "demo",
        "a Hugging Face folder, a hub name, or demo for the shipped model",
        flags=("--model", "--model-path"),
    )
    pipeline_parallel_size: int = option(
        1, "pipeline stages", ge=1, le=1024, flags=("--pipeline-parallel-size", "--pp")
    )
    layers: tuple[int, ...] | None = option(
        None,
        "layers of each stage, as 10,14; default: balanced by cost",
        ge=1,
        le=INT32_MAX,
        parse=parse_layers,
    )
    chat_template: str | None = option(
        None, "file with a chat template in Jinja; default: the model's own", parse=input_file
    )
    dtype: str = option("auto", "arithmetic", choices=DTYPES)
    kv_cache_dtype: str = option(
        "auto",
        "keys and values in the KV cache; auto: as the arithmetic; fp8 is fp8_e4m3, half as large",
        choices=KV_CACHE_DTYPES,
    )
    attention_backend: str = option(
        "auto", "what computes attention; auto: the first that fits", choices=ATTENTION_BACKENDS
    )
    quantization: str = option(
        "none", "int8: linear maps by 8-bit weights and activations", choices=QUANTIZATIONS
    )
    device: str = option(
        "auto", "where to compute; auto: on GPUs where there are some", choices=DEVICES
    )
    gpu_memory_utilization: float = option(
        0.9,
        "on GPUs: share of each one's memory for weights, a step's work and KV cache",
        gt=0,
        le=1,
    )
    max_model_len: int | None = option(
        None, "longest prompt + output; default: the model's", ge=1, le=INT32_MAX
    )
    kv_cache_memory: int | None = option(
        None,
        "bytes of KV cache over all stages, as 2GiB; default: a quarter of the memory left, on "
        "GPUs what --gpu-memory-utilization leaves",
        ge=1,
        le=INT64_MAX,
        parse=parse_bytes,
    )
    threads: int | None = option(
        None, "compute threads of a stage; default: cores / stages", ge=1, le=1024
    )
    seed: int | None = option(
        None,
        "makes requests without a seed of their own repeatable: they get seeds in the order of "
        "arrival from this one; default: random",
        ge=0,
        le=INT64_MAX,
    )
    health_timeout: float = option(
        30.0,
        "seconds without a finished step, work pending, until /health says 503",
        gt=0,
        le=MAX_SECONDS,
    )
    step_log: str | None = option(
        None,
        "file that gets every plan, step time and result as JSON lines; default: none",
        parse=output_file,
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the fix."""
        convert_fields(self)
        stages = self.pipeline_parallel_size
        if self.layers is not None and len(self.layers) != stages:
            raise ValueError(
                f"layers {self.layers} has to give at least one layer to each of the "
                f"{stages} stages (pipeline_parallel_size)"
            )

    @classmethod
    def of(cls, model: str, **options: Any) -> "EngineConfig":
        """A configuration from flat keywords; those of the scheduler are put where they belong."""
        names = {f.name for f in dataclasses.fields(SchedulerConfig)}
        scheduler = {k: options.pop(k) for k in list(options) if k in names - {"max_model_len"}}
        return cls(model=model, scheduler=SchedulerConfig(**scheduler), **options)


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server around an engine."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one", ge=0, le=65535)
    served_model_name: str | None = option(None, "the name clients ask for; default: the model's")
    shutdown_timeout: float = option(
        30.0, "seconds that running requests get after SIGTERM", ge=0, le=MAX_SECONDS
    )
    max_num_queued_requests: int = option(
        2048, "requests in the engine; more get 503", ge=1, le=INT32_MAX
    )
    profile_dir: str | None = option(
        None,
        "folder of the profiles that /start_profile records; default: none are",
        parse=output_folder,
    )
    max_choices: int = option(128, "largest n of a request", ge=1, le=INT32_MAX)
    max_body_bytes: int = option(
        8 * 2**20, "largest request body, as 8MiB", ge=1, le=INT64_MAX, parse=parse_bytes
    )
    api_key: tuple[str, ...] = option(
        (),
        "a key that clients have to send, any number of times, besides those in $GLLM_API_KEY, "
        "separated by commas; ps may show it: a file is safer",
        repeat=True,
        secret=True,
    )
    api_key_file: str | None = option(
        None, "file of such keys, one a line, with # before comments; default: none"
    )
    rate_limit: int | None = option(
        None,
        "requests a minute for each key, or each address without keys; default: no limit",
        ge=1,
        le=INT32_MAX,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origin whose pages may use the server (CORS), any number of times, * for all; default: "
        "only the server's own pages",
        repeat=True,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "host name that requests may be sent to, any number of times, *.example.com for all below "
        "it, * for all; default: localhost on a loopback --host, else all",
        repeat=True,
    )
    ssl_certfile: str | None = option(
        None, "PEM file of the certificate and those above it, for https; default: plain http"
    )
    ssl_keyfile: str | None = option(None, "PEM file of the certificate's private key")
    ssl_ca_certs: str | None = option(
        None, "PEM file of those whose certificates clients have to show; default: none has to"
    )
    header_timeout: float = option(
        30.0,
        "seconds in which a request's headers come; a connection that says nothing is closed",
        gt=0,
        le=MAX_SECONDS,
    )
    read_timeout: float = option(
        60.0, "seconds in which a request's body comes", gt=0, le=MAX_SECONDS
    )
    keep_alive_timeout: float = option(
        75.0,
        "seconds for which a connection may be idle; more than a proxy keeps its own for",
        gt=0,
        le=MAX_SECONDS,
    )
    write_timeout: float = option(
        300.0, "seconds without reading after which a client is cut off", gt=0, le=MAX_SECONDS
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto: as its chat template shows; none: left in the text",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "how the model encloses its reasoning; auto: as its chat template shows; none: left in the "
        "text",
        choices=REASONING_PARSERS,
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = option("text", "log lines for people, or a JSON object each", choices=FORMATS)
    otlp_traces_endpoint: str | None = option(
        None,
        "URL that gets a span of each request by OTLP over HTTP, as "
        "http://localhost:4318/v1/traces; default: $OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or none",
    )

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the fix, and no key."""
        convert_fields(self)
        for number, key in enumerate(self.api_key, 1):
            check_key(key, f"api_key {number}")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s,]+", origin):
                raise ValueError(
                    f"allowed_origins has {origin!r}, but has to have * or origins as "
                    "https://example.com, with a port where there is one, without a path"
                )
        for host in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?", host):
                raise ValueError(
                    f"allowed_hosts has {host!r}, but has to have * or host names as example.com "
                    "or *.example.com, without scheme, port and path"
                )
        pair = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}
        missing = [name for name, value in pair.items() if value is None]
        if len(missing) == 1:
            given = next(name for name in pair if name not in missing)
            raise ValueError(f"{given} is given without {missing[0]}: https needs both")
        if missing and self.ssl_ca_certs is not None:
            raise ValueError("ssl_ca_certs is given without ssl_certfile and ssl_keyfile")


@dataclass(frozen=True)
class StructuredOutput:
    """What an output has to be, exactly one of: `json` that fits a JSON Schema, which is given as
    values or as text; a match of a regular expression; one of several strings; a text of a grammar
    in Lark or GBNF. docs/structured-output.md has what each may hold.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    param: str = "structured"
    """The request's field that asks for it, for errors."""
    strict: bool = False
    """Close every object of the JSON Schema that does not say so itself, also one that lists no
    properties."""

    def __post_init__(self) -> None:
        """Raises FieldError for a value of another type, and unless there is exactly one."""
        convert_fields(self)
        given = [self.json, self.regex, self.choice, self.grammar]
        if sum(one is not None for one in given) != 1:
            raise FieldError(
                self.param, f"{self.param} needs exactly one of json, regex, choice and grammar"
            )


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn and when it ends. None of `max_tokens`: up to the context.

    `n` choices are drawn independently. `stop` strings are cut off the text unless
    `include_stop_str_in_output`; `stop_token_ids` end it as the model's own end-of-sequence ids do,
    which `ignore_eos` switches off.

    `repetition_penalty` is over prompt and output, `presence_penalty` and `frequency_penalty` are
    over the output. `logit_bias` is by token id; `allowed_token_ids` are the only ones drawn;
    `bad_words` never come out. `logprobs` and `prompt_logprobs`: how many of the likeliest tokens
    to tell with each token, None for none of it. `truncate_prompt_tokens` keeps the prompt's last
    so many tokens, -1 as many as leave room for the output. `shown_tokens` are special tokens that
    are text although `skip_special_tokens`. `structured` says what the output has to be; it ends
    where nothing can follow, whatever `ignore_eos` says.

    Numbers and arrays of numpy are converted; a float for an integer, 3.0 too, or a boolean for a
    number is refused, and so is NaN. One string stands for a sequence of it; None for an empty one.
    """

    temperature: float = bounded(1.0, ge=0, le=2)
    top_p: float = bounded(1.0, gt=0, le=1)
    top_k: int = bounded(-1, ge=-1, le=INT32_MAX)
    min_p: float = bounded(0.0, ge=0, le=1)
    seed: int | None = bounded(None, ge=-(2**63), le=INT64_MAX)
    n: int = bounded(1, ge=1, le=MAX_N)
    max_tokens: int | None = bounded(None, ge=1, le=INT32_MAX)
    min_tokens: int = bounded(0, ge=0, le=INT32_MAX)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = bounded((), ge=0, le=INT32_MAX)
    ignore_eos: bool = False
    repetition_penalty: float = bounded(1.0, gt=0)
    presence_penalty: float = bounded(0.0, ge=-2, le=2)
    frequency_penalty: float = bounded(0.0, ge=-2, le=2)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = bounded(None, ge=0, le=INT32_MAX)
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = bounded(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = bounded(None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = bounded(None, ge=-1, le=INT32_MAX)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    shown_tokens: tuple[str, ...] = ()
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        """Raises FieldError for a value of another type or out of its range."""
        convert_fields(self)
        check_sampling_sizes(self)
        if self.min_tokens:
            limit = self.max_tokens
            self._check("min_tokens", limit is None or self.min_tokens <= limit, "in 0..max_tokens")
            rule = "0 with structured output, which ends by its own rules"
            self._check("min_tokens", self.structured is None, rule)
        self._check("stop", all(self.stop), "non-empty strings")
        self._check("bad_words", all(self.bad_words), "non-empty strings")
        if self.logit_bias:
            ids_fit = all(0 <= i <= INT32_MAX for i in self.logit_bias)
            self._check("logit_bias", ids_fit, "token ids, 0 or above")
            biases_fit = all(-100 <= bias <= 100 for bias in self.logit_bias.values())
            self._check("logit_bias", biases_fit, "token ids with values in [-100, 100]")
        # That ids are in the vocabulary is for the model to say.
        self._check("allowed_token_ids", self.allowed_token_ids != (), "None or some token ids")
        self._check("truncate_prompt_tokens", self.truncate_prompt_tokens != 0, "-1 or >= 1")

    def _check(self, name: str, good: bool, rule: str) -> None:
        if not good:
            raise rule_error(name, getattr(self, name), rule)


def check_key(key: str, origin: str) -> None:
    """Raises ValueError for a key that no header can carry; it names the origin, not the key."""
    if not key or not all("!" <= char <= "~" for char in key):
        raise ValueError(f"{origin}: a key has to be printable ASCII without spaces, not empty")
