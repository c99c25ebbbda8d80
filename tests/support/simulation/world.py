"""What the simulated processes of an engine share: sizes, the clock, moments and open instances."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from gllm.config.engine import EngineConfig
from gllm.recovery.placement import Placement, WorkerPlacement
from tests.support.simulation.model import VOCAB_SIZE
from tests.support.simulation.network import Network
from tests.support.simulation.process import Process
from tests.support.simulation.rank_group import RankGroup

if TYPE_CHECKING:
    from tests.support.simulation.instance import Instance

BLOCK_SIZE = 4
NUM_BLOCKS = 48
LAYERS_PER_STAGE = 4
"""Layers per stage before other layers are chosen."""
MAX_MODEL_LEN = 96
REPORT_SECONDS = 0.5
LOST_SECONDS = 5.0
POISON_TOKEN = VOCAB_SIZE - 1
"""A prompt that begins with it kills the stage that computes it."""
BOMB_TOKEN = VOCAB_SIZE - 2
"""A prompt that begins with it kills the machine of the stage that computes it."""


@dataclass
class World:
    """What all processes share."""

    loop: Any
    rng: Random
    network: Network
    on_moment: Callable[[str, Process], None]
    """Called at each step of a process's life; it may end or stop the process."""
    instances: list["Instance"] = field(default_factory=list)
    """Open ones, of living processes and of those that died with them."""
    is_lost: Callable[[Process], bool] = lambda machine: False
    """Returns True for a machine whose processes no longer belong to the engine."""
    bombs: set[tuple[int, int, int]] = field(default_factory=set)
    """Run, epoch and wire id of sequences whose prompts begin with BOMB_TOKEN."""
    num_steps: int = 0
    state_bytes: int = 0
    """Bytes of a state slot of each worker; 0 for a model without recurrent layers."""
    memory_per_worker: int | None = None
    """Bytes that a machine has for each worker of its stages; None for any number."""
    short_num_stages: int = 0
    """Number of stages with which machines have no memory for keys and values."""
    slowness: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 10.0)
    """Factors of the times of processes, from which each draws one."""

    def begin_instance(self, instance: "Instance") -> None:
        """Check that no instance of another epoch is at work on a machine of the engine."""
        self.instances = [
            each for each in self.instances if each.process.is_alive and not each.is_closed
        ]
        epoch = instance.placement.epoch
        for each in self.instances:
            is_current = each.placement.epoch == epoch
            is_fenced = any(self.is_lost(one.process.machine) for one in (each, instance))
            assert is_current or is_fenced, "two epochs are at work"
        self.instances.append(instance)


@dataclass
class Assignment:
    """What a worker is assigned."""

    placement: Placement
    sender: int
    config: EngineConfig
    driver_address: str
    plan_record: int | None
    group: RankGroup | None
    """None where the stage has one rank."""
    is_probe: bool = False
    change: int = 0
    """Number of the planned change for which it only loads layers; 0 for none."""

    @property
    def place(self) -> WorkerPlacement:
        place = self.placement.place_of(self.sender)
        assert place is not None
        return place

    @property
    def slowdown(self) -> float:
        """Factor on the times of steps, besides that of a slow process."""
        return self.config.slowdown_of(self.place.stage)
