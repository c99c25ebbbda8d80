"""Space of engine designs: device, parallelism, policy and batch size."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from gllm.options.options import EntryChoices
from gllm.plan.layout import Parallelism
from gllm.plan.nodes import CORE
from gllm.scheduler.config import POLICY_NAMES, SchedulerConfig
from gllm.scheduler.policy_entry import expand_policy, load_policy
from gllm.sim.costs.profile import CostProfile
from gllm.sim.deployment import Deployment
from gllm.sim.hardware.devices import DEVICES
from gllm.sim.options import SimulationConfig


class EngineDesign(NamedTuple):
    """Candidate configuration of an engine: device, parallelism, scheduling policy, batch size."""

    device: str
    """A name of DEVICES, or CORE."""
    parallelism: Parallelism
    policy: str
    max_num_batched_tokens: int | None
    """Largest number of tokens per micro-batch; None: the policy's default."""
    max_num_seqs: int
    """Largest number of sequences in a batch."""

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.parallelism.num_gpus

    @property
    def policy_text(self) -> str:
        """Policy and its tokens per micro-batch, in the form of `--policies`."""
        tokens = self.max_num_batched_tokens
        return self.policy if tokens is None else f"{self.policy}:{tokens}"

    def __str__(self) -> str:
        device = f"{self.num_devices} x {self.device or 'core'}"
        tp, pp = self.parallelism
        return f"{device} (PP {pp}, TP {tp}), {self.policy_text}, batch {self.max_num_seqs}"

    def configure(self, config: SimulationConfig) -> SimulationConfig:
        """Return a simulation configuration with this design."""
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
            pipeline_parallel_size=self.parallelism.pp,
            tensor_parallel_size=(self.parallelism.tp,) if has_device else None,
            scheduler=scheduler,
        )


@dataclass(frozen=True)
class DesignSpace:
    """Values of each engine option that a search combines: device, TP, PP, policy, batch size."""

    devices: Sequence[str]
    stages: Sequence[int]
    """Pipeline-parallel degrees."""
    ranks: Sequence[int]
    """Tensor-parallel degrees."""
    policies: Sequence[tuple[str, int | None]]
    """(scheduling policy, tokens per micro-batch); None: the policy's default."""
    max_num_seqs: Sequence[int]

    def designs(self, max_devices: int) -> Iterator[EngineDesign]:
        """Yield all designs with at most `max_devices` devices."""
        for device, stages, ranks, policy, seqs in product(
            self.devices, self.stages, self.ranks, self.policies, self.max_num_seqs
        ):
            if stages * ranks <= max_devices:
                yield EngineDesign(device, Parallelism(ranks, stages), *policy, seqs)


def parse_policies(text: str) -> tuple[tuple[str, int | None], ...]:
    """Parse scheduling policies with optional tokens per micro-batch, as in `vllm,sarathi:512`.

    Args:
        text: NAME or NAME:TOKENS, separated by commas; a name may be `module:Class`.

    Returns:
        (name, tokens per micro-batch) of each policy; None: the policy's default.

    Raises:
        ValueError: A policy is unknown or cannot be imported, or its tokens are not a positive
            number.
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
    """Parse device names that are separated by commas. Raises ValueError for an unknown name."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in DEVICES:
            raise ValueError(f"--devices {text}: {name!r} is none of {', '.join(DEVICES)}")
    return names


def design_of(config: SimulationConfig, deployment: Deployment) -> EngineDesign:
    """Return device, parallelism, policy and batch size of a simulation configuration.

    Args:
        config: Configuration of the simulation.
        deployment: Engine that was built from it.

    Raises:
        ValueError: Its pipeline stages have different devices or numbers of ranks.
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
        Parallelism(degrees[0], len(deployment.layers)),
        scheduler.policy,
        scheduler.max_num_batched_tokens,
        scheduler.max_num_seqs,
    )


def cap_policies(
    policies: Sequence[tuple[str, int | None]], config: SchedulerConfig, profile: CostProfile
) -> tuple[tuple[tuple[str, int | None], ...], list[str]]:
    """Limit tokens per micro-batch of scheduling policies to the largest measured micro-batch.

    Policies that become equal are listed once.

    Args:
        policies: (name, tokens per micro-batch); None: the policy's default.
        config: Other scheduler options.
        profile: Measured step times; larger micro-batches cannot be predicted.

    Returns:
        The policies, and a message about each change.
    """
    most = max(step.tokens for step in profile.steps)
    capped, notes = [], []
    for name, tokens in policies:
        # Of several stages, `auto` has another policy than of one.
        usual = max(_max_batched_tokens(config, name, tokens, stages) for stages in (1, 2))
        if usual <= most:
            capped.append((name, tokens))
            continue
        capped.append((name, most))
        text = name if tokens is None else f"{name}:{tokens}"
        notes.append(
            f"policy {text}: {most} instead of {usual} tokens per micro-batch, the most that the "
            f"profile has: `gllm profile --max-num-batched-tokens {usual}` measures more"
        )
    return tuple(dict.fromkeys(capped)), notes


def _max_batched_tokens(
    config: SchedulerConfig, policy: str, tokens: int | None, stages: int
) -> int:
    chosen = replace(config, policy=policy, max_num_batched_tokens=tokens)
    resolved = chosen.resolve(stages, num_blocks=1, max_model_len=1)
    assert resolved.max_num_batched_tokens is not None, "the configuration is resolved"
    return resolved.max_num_batched_tokens
