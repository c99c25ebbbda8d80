"""Space of engine designs: device, parallelism, policy and batch size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from gllm.options.options import EntryChoices
from gllm.scheduler.config import POLICY_NAMES
from gllm.scheduler.policy_entry import expand_policy, load_policy
from gllm.sim.deployment import Deployment
from gllm.sim.hardware.devices import DEVICES
from gllm.sim.options import SimulationConfig

CORE = ""
"""Device of a design whose costs come from a profile of this machine: a core for each stage."""


class EngineDesign(NamedTuple):
    """One engine."""

    device: str
    """A name of DEVICES, or CORE."""
    stages: int
    ranks: int
    """Tensor-parallel ranks of each stage."""
    policy: str
    max_num_batched_tokens: int | None
    """Most tokens per micro-batch; None: the policy's default."""
    max_num_seqs: int

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.stages * self.ranks

    @property
    def policy_text(self) -> str:
        """Policy and its tokens per micro-batch, as `--policies` takes them."""
        tokens = self.max_num_batched_tokens
        return self.policy if tokens is None else f"{self.policy}:{tokens}"

    def __str__(self) -> str:
        device = f"{self.num_devices} x {self.device or 'core'}"
        parallelism = f"PP {self.stages}, TP {self.ranks}"
        return f"{device} ({parallelism}), {self.policy_text}, batch {self.max_num_seqs}"

    def configure(self, config: SimulationConfig) -> SimulationConfig:
        """Return a configuration with this design."""
        scheduler = replace(
            config.scheduler,
            policy=self.policy,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
        )
        has_device = self.device != CORE
        return replace(
            config,
            device=self.device if has_device else config.device,
            pipeline_parallel_size=self.stages,
            tensor_parallel_size=(self.ranks,) if has_device else None,
            scheduler=scheduler,
        )


@dataclass(frozen=True)
class DesignSpace:
    """Values of each field of a design."""

    devices: Sequence[str]
    stages: Sequence[int]
    ranks: Sequence[int]
    policies: Sequence[tuple[str, int | None]]
    """Names and tokens per micro-batch."""
    max_num_seqs: Sequence[int]

    def designs(self, max_devices: int) -> Iterator[EngineDesign]:
        """Yield the designs of at most `max_devices` devices."""
        for device, stages, ranks, policy, seqs in product(
            self.devices, self.stages, self.ranks, self.policies, self.max_num_seqs
        ):
            if stages * ranks <= max_devices:
                yield EngineDesign(device, stages, ranks, *policy, seqs)


def parse_policies(text: str) -> tuple[tuple[str, int | None], ...]:
    """Return names and tokens per micro-batch of a text such as `vllm,sarathi:512`.

    Raises:
        ValueError: A policy is unknown or cannot be imported, or its tokens are no number from 1
            on.
    """
    policies = []
    for part in text.split(","):
        name, _, tokens = part.strip().rpartition(":")
        if not (name and tokens.isascii() and tokens.isdigit() and int(tokens)):
            name, tokens = part.strip(), ""
        entry = expand_policy(name.strip())
        if entry not in EntryChoices(POLICY_NAMES):
            raise ValueError(
                f"--policies {text}: {part!r} has to be NAME or NAME:TOKENS with one of "
                f"{', '.join(POLICY_NAMES)} or an entry module:Class, as in vllm,sarathi:512"
            )
        if ":" in entry:
            load_policy(entry, "--policies")
        policies.append((name.strip(), int(tokens) if tokens else None))
    return tuple(policies)


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the names of devices, separated by commas. Raises ValueError for an unknown one."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in DEVICES:
            raise ValueError(f"--devices {text}: {name!r} is none of {', '.join(DEVICES)}")
    return names


def design_of(config: SimulationConfig, deployment: Deployment) -> EngineDesign:
    """Return the design of a configuration.

    Raises:
        ValueError: Its stages have different devices or numbers of ranks.
    """
    degrees = deployment.degrees or [1]
    if "," in config.device or len(set(degrees)) > 1:
        raise ValueError(
            "a plan of this command has equal stages: give one --device and one --tp, or leave "
            "--output out"
        )
    scheduler = config.scheduler
    return EngineDesign(
        CORE if config.profile else config.device,
        len(deployment.layers),
        degrees[0],
        scheduler.policy,
        scheduler.max_num_batched_tokens,
        scheduler.max_num_seqs,
    )
