"""Deployments whose step times come from profiles: measured here, Vidur's or DistServe's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from gllm.options.degrees import expand_degrees
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.distserve import (
    SYSTEMS,
    DistServeCostModel,
    read_coefficients,
    read_kv_capacity,
)
from gllm.sim.costs.fitted import FittedCostModel
from gllm.sim.costs.profile import CostProfile, read_profile
from gllm.sim.deployment import USABLE_MEMORY_SHARE, Deployment, roofline_deployment
from gllm.sim.hardware.devices import NetworkLink, find_link
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.hardware.stages import build_hardware, format_degrees, look_up, split_layers_evenly

VIDUR = "vidur"
VIDUR_RANKS = 2
"""Devices of each stage in these profiles."""

VIDUR_MODEL = "vidur:"
"""Begin of the names of profiles of Vidur's models on `--device`."""

DISTSERVE = "distserve:"
OPT_MAX_MODEL_LEN = 2048
"""Context of the OPT models, in tokens."""


@dataclass(frozen=True)
class ProfileOptions:
    """Options of `gllm simulate` that apply if step times come from a measured profile."""

    scheduler: SchedulerConfig
    longest: int
    """Prompt plus output tokens of the longest request in the workload."""
    stages: int | None = None
    """Number of pipeline stages; default: the profile's."""
    degrees: Sequence[int] | None = None
    """Tensor parallel size of all stages, or of each; default: the profile's."""
    layers: Sequence[int] | None = None
    """Number of layers of each stage; default: as measured, or as equal as possible."""
    link: str = "pcie"
    """Name of the link (LINKS) between stages, for profiles that measured none."""
    max_model_len: int | None = None
    """Longest sequence in tokens; default: the profile's, or `longest`."""
    device: str = ""
    """Name of the device (DEVICES), for profiles of several devices."""
    includes_host: bool = True
    """True to include the work of frontend and client, as far as the profile measured it; False for
    the engine alone."""

    @property
    def num_stages(self) -> int:
        """Number of stages; default: that of `layers`, or 1."""
        return self.stages or (1 if self.layers is None else len(self.layers))

    def equal_degrees(self, subject: str) -> list[int]:
        """Return the number of ranks of each stage, 1 by default.

        Raises:
            ValueError: The numbers differ; `subject` is a sentence about the stages.
        """
        degrees = expand_degrees(self.degrees or (1,), self.num_stages)
        if len(set(degrees)) > 1:
            raise ValueError(f"--tp {format_degrees(degrees)}: {subject}")
        return degrees


def measured_path(profile: str) -> Path | None:
    """Return the path of a profile by `gllm profile`; None if it names published measurements.

    Args:
        profile: Value of `--profile`.
    """
    is_published = profile == VIDUR or profile.startswith((VIDUR_MODEL, DISTSERVE))
    return None if is_published else Path(profile)


def is_profile_file(profile: str) -> bool:
    """Return True if `--profile` names a file of `gllm profile`: no folder, no published data.

    Args:
        profile: Value of `--profile`.
    """
    path = measured_path(profile)
    return path is not None and not path.is_dir()


def profiled_deployment(profile: str, options: ProfileOptions) -> Deployment:
    """Return an engine configuration whose step times come from a measured profile.

    Args:
        profile: Published measurements (`vidur`, `vidur:MODEL`, `distserve:MODEL` or
            `distserve:MODEL,SYSTEM`), the file of `gllm profile`, or the folder of `gllm profile
            --operators`.
        options: Scheduler, parallelism and context length.

    Raises:
        ValueError: The options do not fit the profile.
        OSError: The profile cannot be read.
    """
    if profile == VIDUR:
        return _build_vidur(options)
    if profile.startswith(VIDUR_MODEL):
        return _build_vidur_model(profile.removeprefix(VIDUR_MODEL), options)
    if profile.startswith(DISTSERVE):
        return _build_distserve(profile.removeprefix(DISTSERVE), options)
    if Path(profile).is_dir():
        return _build_from_operators(Path(profile), options)
    try:
        measured = read_profile(profile)
    except OSError as error:
        raise ValueError(f"--profile {profile}: cannot be read: {error.strerror}") from None
    return _build_measured(profile, measured, options)


def _build_measured(path: str, profile: CostProfile, options: ProfileOptions) -> Deployment:
    """Return the measured pipeline, or the same model in another cut on equal devices.

    A stage with fewer layers has KV blocks of fewer bytes, so more of them.
    """
    stages = options.stages or len(options.layers or profile.layers)
    layers = list(options.layers or profile.layers)
    if options.layers is not None and len(layers) != stages:
        raise ValueError(f"--layers names {len(layers)} stages, but --pp is {stages}: match them")
    if len(layers) != stages:
        layers = split_layers_evenly(sum(profile.layers), stages)
    measured = profile.degrees or [1] * len(profile.layers)
    degrees = measured if layers == profile.layers else measured[:1] * stages
    if options.degrees is not None and expand_degrees(options.degrees, stages) != degrees:
        raise ValueError(
            f"{path} was measured at --tp {format_degrees(profile.degrees)}: measure it at "
            f"--tp {format_degrees(options.degrees)}, or leave --tp out"
        )
    link = _link_between_stages(profile, options.link)
    modified = Path(path).stat().st_mtime_ns
    cost = _fit_profile(
        path, modified, tuple(layers), link, options.includes_host
    ).with_own_counts()
    scheduler = options.scheduler.resolve(
        stages,
        profile.scheduler.num_blocks * max(profile.layers) // max(layers),
        options.max_model_len or profile.scheduler.max_model_len,
    )
    return Deployment(
        profile.model, layers, cost, scheduler, degrees=degrees if max(degrees) > 1 else []
    )


def _link_between_stages(profile: CostProfile, names: str) -> NetworkLink:
    """Return the link between stages, which holds where the profile measured none.

    Raises:
        ValueError: A name is unknown, or the links are unlike, and a profile has one for all.
    """
    links = [find_link("link", name.strip()) for name in names.split(",")]
    if len(set(links)) > 1 and not profile.links:
        raise ValueError(f"--link {names}: a profile has equal links between stages: name one")
    return links[0]


@lru_cache(maxsize=16)
def _fit_profile(
    path: str, modified: int, layers: tuple[int, ...], link: NetworkLink, includes_host: bool
) -> FittedCostModel:
    """Return the fits of a profile, which take seconds: a search prices many designs of one cut.

    Args:
        path: Of the profile.
        modified: Time of its last change in nanoseconds.
        layers: Number of layers of each stage.
        link: Between the stages, where the profile measured none.
        includes_host: With the work of frontend and client.
    """
    return FittedCostModel(read_profile(path), layers, link, includes_host)


def _build_vidur(options: ProfileOptions) -> Deployment:
    """Return Llama-2-70B on pairs of A100s with 80 GB, tensor parallel within a stage."""
    stages = options.num_stages
    degrees = [VIDUR_RANKS] * stages
    if options.degrees is not None and expand_degrees(options.degrees, stages) != degrees:
        raise ValueError(f"vidur's profiles are of --tp {VIDUR_RANKS}: leave --tp out")
    # scikit-learn and its forests take seconds: only where asked for.
    from gllm.sim.costs.forest import ROWS, ForestCostModel

    cost = ForestCostModel(stages, layers=options.layers)
    hardware = build_hardware(
        "llama-2-70b", "A100-80G", stages, "nvlink", degrees, layers=cost.layers
    )
    blocks = min(hardware.stage_kv_blocks(options.scheduler.block_size, USABLE_MEMORY_SHARE))
    # All decodes may be in one micro-batch, and none of more rows was measured.
    num_seqs = min(options.scheduler.max_num_seqs, int(cost.ranges[ROWS][1]))
    scheduler = replace(options.scheduler, max_num_seqs=num_seqs)
    return Deployment(
        "llama-2-70b",
        cost.layers,
        cost,
        scheduler.resolve(stages, blocks, options.max_model_len or options.longest),
        degrees=degrees,
        hardware=hardware,
    )


def _build_vidur_model(model: str, options: ProfileOptions) -> Deployment:
    """Return a model of Vidur's tables on equal devices, joined by NVLink in pairs."""
    stages = options.num_stages
    degrees = options.equal_degrees("Vidur's stages have equal ranks")
    # scikit-learn and its forests take seconds: only where asked for.
    from gllm.sim.costs.token_forest import TokenForestCostModel, check_profiled

    check_profiled(model, options.device)
    config, length = options.scheduler, options.max_model_len or options.longest
    fitting = roofline_deployment(
        model, options.device, stages, length, "nvlink", config, degrees=degrees,
        layers=options.layers,
    )  # fmt: skip
    assert fitting.hardware is not None, "the roofline has a shape"
    return replace(fitting, cost=TokenForestCostModel(model, options.device, fitting.hardware))


def _build_distserve(name: str, options: ProfileOptions) -> Deployment:
    """Return an OPT model on A100s with 80 GB, with the coefficients of DistServe's artifact."""
    model, _, system = name.partition(",")
    if system not in ("", *SYSTEMS):
        raise ValueError(f"--profile distserve:{name}: {system!r} is none of {', '.join(SYSTEMS)}")
    stages = options.num_stages
    degrees = options.equal_degrees("DistServe's stages have equal numbers of ranks")
    coefficients = read_coefficients(system or SYSTEMS[0], model, degrees[0])
    blocks = read_kv_capacity(model, degrees[0], stages) // options.scheduler.block_size
    most = max(options.longest, options.max_model_len or 0)
    if most > OPT_MAX_MODEL_LEN:
        raise ValueError(
            f"--profile distserve:{name}: OPT models have a context of {OPT_MAX_MODEL_LEN} tokens, "
            f"not {most}: cut the requests (--max-request-tokens {OPT_MAX_MODEL_LEN}), lower "
            "--max-model-len or choose another workload"
        )
    length = options.max_model_len or OPT_MAX_MODEL_LEN
    layers = split_layers_evenly(look_up("model", model, MODELS).layers, stages)
    if options.layers not in (None, tuple(layers)):
        raise ValueError("--layers: DistServe's stages have equal numbers of layers: leave it out")
    return Deployment(
        model,
        layers,
        DistServeCostModel(coefficients, stages),
        options.scheduler.resolve(stages, blocks, length),
        degrees=degrees if degrees[0] > 1 else [],
    )


def _build_from_operators(folder: Path, options: ProfileOptions) -> Deployment:
    """Return the model of an operator profile; every sequence has space in its KV cache."""
    from gllm.sim.costs.forest import ROWS, ForestCostModel
    from gllm.sim.costs.operator_tables import read_folder

    stages = options.num_stages
    degrees = options.equal_degrees("with operator profiles all stages have equal ranks")
    tables = read_folder(folder)
    cost = ForestCostModel(stages, tp=degrees[0], layers=options.layers, tables=tables)
    config, length = options.scheduler, options.max_model_len or options.longest
    num_seqs = min(config.max_num_seqs, int(cost.ranges[ROWS][1]))
    blocks = num_seqs * -(-length // config.block_size)
    return Deployment(
        cost.model,
        cost.layers,
        cost,
        replace(config, max_num_seqs=num_seqs).resolve(stages, blocks, length),
        degrees=degrees if degrees[0] > 1 else [],
    )
