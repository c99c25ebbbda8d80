"""Configuration of one engine: model, stages, memory, scheduler.

Declares defaults and ranges. Values that depend on the model or the device are resolved by
`gllm.engine.preflight` and by the workers.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from gllm.config.emulation import DEVICES, EMULATED, EmulationConfig, is_emulated
from gllm.config.hf_overrides import OVERRIDES_HELP, convert_hf_overrides, parse_hf_overrides
from gllm.config.kv_backends import AUTO, check_backend_name
from gllm.config.kv_events import KvEventsConfig, parse_kv_events
from gllm.config.link_encodings import LINK_ENCODINGS, PLAIN
from gllm.config.sized_folder import check_sized_folder, parse_sized_folder
from gllm.options.addresses import parse_host_port, undialable_reason
from gllm.options.degrees import as_degrees, expand_degrees
from gllm.options.field_types import FieldError, convert_fields
from gllm.options.flags import (
    LAYER_DIVISIONS,
    input_file,
    output_file,
    output_folder,
    parse_bytes,
    parse_counts,
    parse_floats,
    parse_layers,
)
from gllm.options.options import INT32_MAX, INT64_MAX, MAX_TIMEOUT_SECONDS, option
from gllm.routing.lengths.registry import PREDICTOR_HELP, check_length_predictor
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_admission import RESERVING_ADMISSIONS

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Values of --dtype."""
QUANTIZATION_DEVICES = {
    "none": ("cpu", "cuda", EMULATED),
    "int8": ("cpu",),
    "int4": ("cpu", "cuda"),
}
"""Devices that have kernels for each value of `quantization`."""
QUANTIZATIONS = tuple(QUANTIZATION_DEVICES)
KV_CACHE_DTYPES = (
    "auto",
    "bfloat16",
    "float16",
    "fp8",
    "fp8_e4m3",
    "int8",
    "int8_per_token_head",
)
"""Values of --kv-cache-dtype."""
BIDIRECTIONAL_ON_GPU = (
    "device cuda does not compute bidirectional attention and the mean of hidden states, which "
    "this embedding model has: choose --device cpu"
)
INDEXER_ON_GPU = (
    "device cuda does not select keys by an indexer (sparse attention), which this model does in "
    "texts of more than {0} tokens: set --max-model-len {0} or less, or choose --device cpu"
)
STAGE_DRAFTS_ON_GPU = (
    "speculative_config: method {0} drafts with weights, which GPUs do not compute yet: choose "
    "method ngram, or set device to cpu"
)
WEIGHT_CACHE_ON_GPU = (
    "weight_cache has weights as the kernels of CPUs read them: leave it out, or set device to cpu"
)
CPU_EXPERTS_ON_CPU = (
    "cpu_experts keeps experts in the memory of the host beside a GPU, but with device cpu all "
    "weights are there: leave cpu_experts out"
)
NO_EXPERTS, ALL_EXPERTS = "none", "all"
"""Values of --cpu-experts that are no number."""
MAX_RANKS = 64
"""Most workers of one stage; a worker gets an edge to each worker of the next stage."""
ATTENTION_BACKENDS = ("auto", "flash-attn", "native", "torch", "triton")
"""Values of --attention-backend."""


def parse_cpu_experts(text: str) -> str:
    """Check a value of --cpu-experts: all, none or a number of layers. Raises ValueError."""
    if text in (NO_EXPERTS, ALL_EXPERTS) or (text.isascii() and text.isdigit() and int(text)):
        return text
    raise ValueError(f"{text!r} has to be {ALL_EXPERTS}, {NO_EXPERTS} or a number from 1 on")


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine: model, parallelism, memory, KV cache and scheduler."""

    model: str = option(
        "demo",
        "a Hugging Face folder, a GGUF file, a hub name, or demo for the shipped model",
        flags=("--model", "--model-path"),
        is_common=True,
    )
    pipeline_parallel_size: int = option(
        1,
        "pipeline stages",
        ge=1,
        le=1024,
        flags=("--pipeline-parallel-size", "--pp"),
        is_common=True,
    )
    tensor_parallel_size: tuple[int, ...] = option(
        (1,),
        "workers that compute each stage together (tensor parallelism): one number, or one per "
        "stage, such as 2,1; default: 1",
        ge=1,
        le=MAX_RANKS,
        parse=parse_counts,
        flags=("--tensor-parallel-size", "--tp", "-tp"),
        is_common=True,
    )
    layers: tuple[int, ...] | str = option(
        "auto",
        "number of layers per stage, such as 10,14; even: by the weights read per token; auto: by "
        "measured times where the stages' speeds may differ, else even",
        ge=1,
        le=INT32_MAX,
        parse=parse_layers,
    )
    rebalance: bool = option(
        False,
        "divide the layers anew while serving, with a short pause of all streams, when measured "
        "step times show that another division is faster by more than 15 % for some time, or a "
        "machine that has joined makes it so",
    )
    tokenizer: str | None = option(
        None,
        "folder or hub name of another tokenizer, with its chat template; default: the model's own",
    )
    chat_template: str | None = option(
        None, "Jinja file with the chat template; default: the model's own", parse=input_file
    )
    hf_overrides: str | None = option(None, OVERRIDES_HELP, parse=parse_hf_overrides)
    language_model_only: bool = option(
        True,
        "of a multimodal class serve the language model, without images, video and audio; they are "
        "not implemented, so such a class is refused with --no-language-model-only",
    )
    dtype: str = option(
        "auto", "data type of weights and activations", choices=DTYPES, is_common=True
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of the KV cache; auto: that of --dtype; fp8 is fp8_e4m3 and halves the cache; "
        "int8 is int8_per_token_head: integers with a scale per token and head, on CPUs only",
        choices=KV_CACHE_DTYPES,
    )
    attention_backend: str = option(
        "auto",
        "attention kernels; auto: the first backend that supports the model",
        choices=ATTENTION_BACKENDS,
    )
    quantization: str = option(
        "none",
        "int8: linear layers with 8-bit weights and activations, on CPUs only; int4: weights of 4 "
        "bits in groups of 32 inputs, on CPUs with 8-bit activations",
        choices=QUANTIZATIONS,
        is_common=True,
    )
    device: str = option(
        "auto",
        "device of the stages; auto: GPUs if there are any; emulated:NAME, such as emulated:L20: a "
        "device of gllm simulate that computes nothing and takes the predicted times",
        choices=DEVICES,
        is_common=True,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "fraction of each GPU's memory for weights, activations and KV cache",
        gt=0,
        le=1,
        is_common=True,
    )
    max_model_len: int | None = option(
        None,
        "maximum tokens of prompt plus output; default: the model's context length",
        ge=1,
        le=INT32_MAX,
        is_common=True,
    )
    kv_cache_memory: int | None = option(
        None,
        "bytes of the KV cache over all workers, such as 2GiB, of which each machine needs the "
        "part of its layers; default: a quarter of the free memory of the machine with the least "
        "for its layers; on GPUs the part of --gpu-memory-utilization that weights and activations "
        "leave",
        ge=1,
        le=INT64_MAX,
        parse=parse_bytes,
        is_common=True,
    )
    cpu_experts: str = option(
        NO_EXPERTS,
        "all, or a number N: routed experts of all layers, or of the first N layers with experts, "
        "stay in the memory of the host and are computed by its cores; GPUs compute everything "
        "else (default none)",
        parse=parse_cpu_experts,
        flags=("--cpu-experts", "--n-cpu-moe", "--cpu-moe"),
        bare=ALL_EXPERTS,
    )
    expert_cache: int | None = option(
        None,
        "with --cpu-experts: bytes of each GPU's memory, such as 8GiB, for those of these experts "
        "that save most time there, by measured use; default: none",
        ge=1,
        le=INT64_MAX,
        parse=parse_bytes,
    )
    weight_cache: str | None = option(
        None,
        "FOLDER or FOLDER:SIZE, such as /var/cache/gllm:20GiB: the workers of CPUs write packed "
        "weights to files there and map them, so that restarts need not read and pack the model "
        "and all engines of a model on the machine share its memory; default: off; without a size "
        "at most half of the file system",
        parse=check_sized_folder(),
    )
    threads: int | None = option(
        None,
        "compute threads of each worker; default: an equal share of its machine's cores",
        ge=1,
        le=1024,
        is_common=True,
    )
    seed: int | None = option(
        None,
        "seed from which requests without their own seed get one, in order of arrival; default: "
        "random",
        ge=0,
        le=INT64_MAX,
    )
    health_timeout: float = option(
        30.0,
        "seconds without a finished step, while work is pending, until /health returns 503",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    max_restarts: int = option(
        3,
        "restarts of a stage's worker without a finished step or five ready minutes between, until "
        "the engine ends; 0: it ends when a worker dies",
        ge=0,
        le=INT32_MAX,
    )
    recovery_timeout: float = option(
        60.0,
        "seconds for which requests wait for workers to be restarted, until they end with an error",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    freeze_timeout: float = option(
        10.0,
        "seconds for which a worker may be stopped, or idle without a heartbeat (at least 5), "
        "until it is replaced; a step without progress may take three times as long",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    standby_workers: int = option(
        0,
        "processes per machine that are ready to replace a dead worker, which saves the time of "
        "its imports and, with a weight_cache, of loading",
        ge=0,
        le=1024,
    )
    crash_folder: str | None = option(
        None,
        "folder that keeps the evidence of the last ten deaths of workers; default: a temporary "
        "folder, removed at the end",
        parse=output_folder,
    )
    length_predictor: str | None = option(
        None,
        f"{PREDICTOR_HELP}; for --kv-admission reserve-static and reserve-dynamic. Requests of "
        "routers have their predictions; default: by-max-tokens",
        parse=check_length_predictor,
    )
    step_log: str | None = option(
        None,
        "file to which every plan, step time and result is written as JSON lines; default: none",
        parse=output_file,
    )
    debug_step_seconds: float = option(
        0.0,
        "a stage's step takes at least this many seconds, by sleeping: a slow device for tests and "
        "experiments",
        ge=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    debug_slowdown: tuple[float, ...] = option(
        (),
        "factor by which each stage's steps take longer, such as 1,2, by sleeping: a slower device "
        "for tests and experiments",
        ge=1,
        le=1000,
        parse=parse_floats,
    )
    kv_events_config: KvEventsConfig | None = option(  # noqa: RUF009
        None,
        "JSON object as in vLLM: changes of the prefix cache, with token ids, are published over "
        'ZeroMQ for routers, such as {"enable_kv_cache_events": true, "endpoint": '
        '"tcp://127.0.0.1:5557"}; default: none',
        parse=parse_kv_events,
    )
    kv_transfer: str | None = option(
        None,
        "give the KV blocks of prompts to other engines and fetch theirs: auto (without a value: "
        "shared memory on one machine, else TCP), shm, tcp, nixl, or mock:GIGABYTES_PER_SECOND, "
        "which waits as long as a link of that bandwidth; default: off",
        flags=("--kv-transfer", "--kv-transfer-config", "--kv-export"),
        bare=AUTO,
    )
    kv_transfer_encoding: str = option(
        PLAIN,
        "encoding of KV blocks over TCP; int8 takes about half of the bytes of bfloat16 and rounds",
        choices=tuple(LINK_ENCODINGS),
    )
    kv_transfer_address: str = option(
        "",
        "HOST:PORT, as other machines reach it, at which their engines fetch KV blocks from here, "
        "over TLS; default: only engines on this machine fetch them",
    )
    kv_staging_tokens: int = option(
        16384,
        "tokens whose KV blocks have a place in pinned memory of the host, in which a GPU's worker "
        "gives them to other engines and gets theirs; a prompt that does not fit is computed",
        ge=1,
        le=INT32_MAX,
    )
    kv_fetch: str = option(
        "auto",
        "KV blocks that are fetched: auto, those that are predicted to be there sooner than "
        "computed; for measurements: always, all of them; never, none",
        choices=("auto", "always", "never"),
    )
    kv_cache_disk: str | None = option(
        None,
        "PATH:SIZE, such as /var/cache/gllm:20GiB: keep KV blocks of prompts in this folder "
        "of each machine, also across restarts, and read them when that is predicted to take less "
        "time than computing them; default: none",
        parse=check_sized_folder(needs_size=True),
    )
    trusted_network: bool = option(
        False,
        "all hosts that reach this one may read prompts: permits what is not encrypted, KV cache "
        "events outside of loopback addresses and NCCL between machines",
    )
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    emulation: EmulationConfig = field(default_factory=EmulationConfig)

    def __post_init__(self) -> None:
        """Convert and check the fields. Raises ValueError that names the field and the fix."""
        degrees = as_degrees(self.tensor_parallel_size)
        object.__setattr__(self, "tensor_parallel_size", degrees)
        convert_hf_overrides(self)
        convert_fields(self)
        stages = self.pipeline_parallel_size
        expand_degrees(self.tensor_parallel_size, stages)
        self._check_layers(stages)
        if self.scheduler.lanes == "2" and max(self.stage_degrees) > 1:
            raise FieldError(
                "lanes",
                f"lanes is 2, but tensor_parallel_size {self.tensor_parallel_size} gives a stage "
                "several ranks, which compute all steps in one order: use lanes auto or 1",
            )
        if self.debug_slowdown and len(self.debug_slowdown) != stages:
            raise ValueError(
                f"debug_slowdown {self.debug_slowdown} has to give a factor for each of the "
                f"{stages} stages (pipeline_parallel_size)"
            )
        self._check_speculation()
        self._check_length_predictor()
        self._check_cpu_experts()
        self._check_weight_cache()
        self._check_kv_transfer()
        self._check_kv_disk()
        address = self.kv_events_config.exposed_address if self.kv_events_config else None
        if address is not None and not self.trusted_network:
            raise ValueError(
                f"kv_events_config publishes token ids on {address}, where other hosts can read "
                "them: use a loopback address, or set trusted_network if all of them may"
            )

    @property
    def keeps_kv_cache(self) -> bool:
        """True if a recovery may use the KV blocks of before the death, through the prefix cache.

        Late bytes of another engine or of the disk may arrive in a block that has another owner by
        then, so that each epoch has a new cache beside a KV mover.
        """
        has_recoveries = self.max_restarts > 0 and not self.is_emulated
        return has_recoveries and self.scheduler.prefix_cache and not self.has_kv_mover

    def _check_speculation(self) -> None:
        """Check `speculative_config` against the device."""
        config = self.scheduler.speculative_config
        if config is not None and config.method == "synthetic" and not self.is_emulated:
            raise FieldError(
                "speculative_config",
                "speculative_config: method synthetic guesses the made-up texts of emulated "
                "devices: choose method ngram, or an emulated device",
            )
        if config is None or not config.is_drafted_by_stage:
            return
        if self.device == "cuda":
            raise FieldError("speculative_config", STAGE_DRAFTS_ON_GPU.format(config.method))
        if self.is_emulated:
            raise FieldError(
                "speculative_config",
                f"speculative_config: method {config.method} drafts with weights, which an "
                "emulated device does not have: choose method synthetic",
            )
        if self.has_kv_mover:
            name = "kv_transfer" if self.kv_transfer is not None else "kv_cache_disk"
            raise FieldError(
                "speculative_config",
                f"speculative_config: method {config.method} has keys and values of its own, which "
                f"{name} does not move: choose method ngram, or leave {name} out",
            )

    def _check_length_predictor(self) -> None:
        """Check that a rule of admission reads the predictions."""
        if self.length_predictor is not None and (
            self.scheduler.kv_admission not in RESERVING_ADMISSIONS
        ):
            raise FieldError(
                "length_predictor",
                f"length_predictor {self.length_predictor} would change nothing: set kv_admission "
                f"to {' or '.join(RESERVING_ADMISSIONS)}, or leave it out",
            )

    @property
    def has_cpu_experts(self) -> bool:
        """True if experts stay in the memory of the host."""
        return self.cpu_experts != NO_EXPERTS

    def _check_cpu_experts(self) -> None:
        """Check `cpu_experts` and `expert_cache` against the device and the ranks."""
        try:
            parse_cpu_experts(self.cpu_experts)
        except ValueError as error:
            raise FieldError("cpu_experts", f"cpu_experts: {error}") from None
        if not self.has_cpu_experts:
            if self.expert_cache is not None:
                raise FieldError(
                    "expert_cache",
                    "expert_cache has experts that cpu_experts keeps in the memory of the host: "
                    f"set cpu_experts to {ALL_EXPERTS}, or leave expert_cache out",
                )
            return
        if self.device == "cpu":
            raise FieldError("cpu_experts", CPU_EXPERTS_ON_CPU)
        if max(self.stage_degrees) > 1:
            raise FieldError(
                "cpu_experts",
                f"cpu_experts is {self.cpu_experts}, but tensor_parallel_size "
                f"{self.tensor_parallel_size} divides each expert among ranks: use "
                "pipeline_parallel_size instead, or leave cpu_experts out",
            )

    def _check_weight_cache(self) -> None:
        """Check the syntax of `weight_cache`, and that the device may be a CPU."""
        if self.weight_cache is None:
            return
        if self.device not in ("auto", "cpu"):
            raise FieldError("weight_cache", f"{WEIGHT_CACHE_ON_GPU}, not {self.device}")
        self._resolve_folder("weight_cache", needs_size=False)

    def _check_kv_transfer(self) -> None:
        """Check `kv_transfer`, whose caches are in the memory of this machine."""
        if self.kv_transfer_address:
            self._check_kv_transfer_address()
        if self.kv_transfer is None:
            return
        try:
            check_backend_name(self.kv_transfer)
        except ValueError as error:
            raise FieldError("kv_transfer", f"kv_transfer: {error}") from None

    def _check_kv_transfer_address(self) -> None:
        name = "kv_transfer_address"
        if self.kv_transfer is None:
            raise FieldError(name, f"{name} needs kv_transfer: set it, or leave {name} out")
        try:
            parse_host_port(self.kv_transfer_address)
        except ValueError as error:
            raise FieldError(name, f"{name}: {error}") from None
        if reason := undialable_reason(self.kv_transfer_address):
            raise FieldError(name, f"{name}: {reason}")

    def _check_kv_disk(self) -> None:
        """Check `kv_cache_disk` against the device and the prefix cache."""
        name = "kv_cache_disk"
        if self.kv_cache_disk is None:
            return
        self._resolve_folder(name, needs_size=True)
        if self.device not in ("cpu", "auto"):
            raise FieldError(
                name,
                f"{name} keeps KV blocks of CPUs, but device is {self.device}: set device to cpu, "
                f"or leave {name} out",
            )
        if not self.scheduler.prefix_cache:
            raise FieldError(
                name,
                f"{name} keeps blocks of the prefix cache, which is off: turn prefix_cache on, or "
                f"leave {name} out",
            )

    def _resolve_folder(self, name: str, needs_size: bool) -> None:
        """Make the folder of a field absolute: other processes have other working directories."""
        try:
            folder = parse_sized_folder(getattr(self, name), needs_size)
        except ValueError as error:
            raise FieldError(name, f"{name}: {error}") from None
        object.__setattr__(self, name, str(folder))

    @property
    def has_kv_mover(self) -> bool:
        """True if a process beside the workers reads and writes the KV caches."""
        return self.kv_transfer is not None or self.kv_cache_disk is not None

    @property
    def stage_degrees(self) -> tuple[int, ...]:
        """Number of workers (tensor-parallel ranks) of each pipeline stage."""
        return tuple(expand_degrees(self.tensor_parallel_size, self.pipeline_parallel_size))

    @property
    def num_workers(self) -> int:
        """Number of workers of all stages."""
        return sum(self.stage_degrees)

    def _check_layers(self, stages: int) -> None:
        """Check `layers`; None and nothing stand for auto."""
        if not self.layers:
            object.__setattr__(self, "layers", "auto")
        counts = self.layer_counts
        if counts is None and self.layers not in LAYER_DIVISIONS:
            raise FieldError(
                "layers",
                f"layers is {self.layers!r}, but has to be {', '.join(LAYER_DIVISIONS)} or the "
                "number of layers per stage",
            )
        if counts is not None and (len(counts) != stages or min(counts) < 1):
            raise ValueError(
                f"layers {counts} has to give at least one layer to each of the "
                f"{stages} stages (pipeline_parallel_size)"
            )

    @property
    def layer_counts(self) -> tuple[int, ...] | None:
        """Number of layers of each stage as configured; None if it is chosen automatically."""
        return None if isinstance(self.layers, str) else self.layers

    @property
    def is_emulated(self) -> bool:
        """True if the stages compute nothing and take predicted times."""
        return is_emulated(self.device)

    def slowdown_of(self, stage: int) -> float:
        """Return the factor of `debug_slowdown` that multiplies the step times of a stage.

        1 for stages on machines that have joined since the start.
        """
        return self.debug_slowdown[stage] if stage < len(self.debug_slowdown) else 1.0

    @classmethod
    def from_options(cls, model: str, **options: Any) -> "EngineConfig":
        """Create a configuration from keyword arguments, including fields of nested classes."""
        own = {spec.name for spec in dataclasses.fields(cls)}

        def pop_fields(config: type) -> dict[str, Any]:
            names = {spec.name for spec in dataclasses.fields(config)} - own
            return {key: options.pop(key) for key in list(options) if key in names}

        scheduler = SchedulerConfig(**pop_fields(SchedulerConfig))
        emulation = EmulationConfig(**pop_fields(EmulationConfig))
        return cls(model=model, scheduler=scheduler, emulation=emulation, **options)
