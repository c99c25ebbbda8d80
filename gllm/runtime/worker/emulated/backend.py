"""Backend of a stage on an emulated device: its memory, and the lateness of its steps."""

import sys
from typing import TYPE_CHECKING

from gllm.models.config import ModelConfig
from gllm.runtime.emulation.deployment import build_emulated_deployment
from gllm.runtime.emulation.device import EmulatedDevice, SenderClock
from gllm.runtime.worker.emulated.executor import EmulatedExecutor
from gllm.runtime.worker.executor import DeviceBackend

if TYPE_CHECKING:
    from gllm.runtime.head.assignment import StageAssignment


THREAD_SWITCH_SECONDS = 0.5e-3
"""Time after which a thread of Python gives way to another. With the default, 5 ms, a thread whose
step has ended waits for the event loop, and plans wait for the thread that samples."""


class EmulatedBackend(DeviceBackend):
    """Gives a stage the memory and the step times of an emulated device."""

    executor: EmulatedExecutor

    def __init__(self, assignment: "StageAssignment", model: ModelConfig, layers: range) -> None:
        """Create the executor; see `gllm.runtime.worker.stage_resources.create_backend`."""
        config, stage = assignment.config, assignment.stage
        assert config.max_model_len is not None
        deployment = build_emulated_deployment(
            config, model.model, config.max_model_len, assignment.degrees, assignment.layer_counts
        )
        hardware = deployment.hardware
        weight_bytes = 0 if hardware is None else int(hardware.rank_weight_bytes(stage))
        incoming = assignment.incoming
        is_remote = incoming is not None and incoming.is_remote
        speed = config.emulation.emulated_speed
        executor = EmulatedExecutor(
            model,
            config,
            assignment.num_stages,
            layers,
            EmulatedDevice(deployment.cost, stage, speed, SenderClock() if is_remote else None),
            weight_bytes,
            is_remote and config.emulation.emulated_bytes,
            returns_remotely=assignment.machine > 0,
            rank=assignment.rank,
            num_ranks=assignment.num_ranks,
        )
        super().__init__(assignment, executor)
        sys.setswitchinterval(THREAD_SWITCH_SECONDS)
        if hardware is None:
            scheduler = deployment.scheduler
            self._kv_bytes = scheduler.num_blocks * executor.block_bytes
            self._kv_bytes += scheduler.num_state_slots * executor.state_bytes
        else:
            memory = hardware.stages[stage].device.memory * config.gpu_memory_utilization
            self._kv_bytes = int(memory) - weight_bytes

    @property
    def late_seconds(self) -> float:
        """Sum over the steps of the time after its end at which a step was noticed."""
        return self.executor.late_seconds

    def available_bytes(self) -> int | None:
        """Return the bytes for KV blocks in the emulated device's memory."""
        return self._kv_bytes
