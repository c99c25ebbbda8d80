"""Configuration of one engine: model, stages, memory, scheduler.

Defaults and ranges only: what depends on the model or the device is resolved where they are known.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from gllm.config.field_types import convert_fields
from gllm.config.flags import input_file, output_file, parse_bytes, parse_layers
from gllm.config.options import INT32_MAX, INT64_MAX, MAX_TIMEOUT_SECONDS, option
from gllm.scheduler.config import SchedulerConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATION_DEVICES = {"none": ("cpu", "cuda"), "int8": ("cpu",)}
"""Devices that have kernels for each value of `quantization`."""
QUANTIZATIONS = tuple(QUANTIZATION_DEVICES)
DEVICES = ("auto", "cpu", "cuda")
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
        le=MAX_TIMEOUT_SECONDS,
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
    def from_options(cls, model: str, **options: Any) -> "EngineConfig":
        """A configuration from flat keywords; those of the scheduler are put where they belong."""
        names = {f.name for f in dataclasses.fields(SchedulerConfig)}
        scheduler = {k: options.pop(k) for k in list(options) if k in names - {"max_model_len"}}
        return cls(model=model, scheduler=SchedulerConfig(**scheduler), **options)
