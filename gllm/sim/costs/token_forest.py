"""Cost model of Vidur's other models: operators by forests, attention by the roofline.

Vidur's tables have the token-level operators of eight models on three devices and the collectives,
but attention of Llama-2-70B at TP 2 on A100 only. Here attention, the LM head and the host take the
roofline, whose constants are fitted to that table.

Source: "Vidur", MLSys'24, arXiv 2405.05465.
"""

from collections.abc import Mapping
from functools import cache

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel, MeasuredRanges, TransferCost
from gllm.sim.costs.operator_grids import TokenTable
from gllm.sim.costs.operators import HEAD, collective_samples, token_samples
from gllm.sim.costs.roofline import (
    SUMS_PER_LAYER,
    DeviceEfficiency,
    LayerRoofline,
)
from gllm.sim.hardware.shapes import BYTES_PER_ELEMENT
from gllm.sim.hardware.stages import PipelineSpec

MS = 1e-3
TOKENS = "num_tokens"
EMBEDDING = "emb"
PROFILED_MODELS = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "codellama-34b": "codellama/CodeLlama-34b-Instruct-hf",
    "internlm-20b": "internlm/internlm-20b",
    "qwen-72b": "Qwen/Qwen-72B",
}
"""Name in Vidur's tables by name of the shape."""
PROFILED_DEVICES = {
    "A100-80G": ("a100", "a100_pairwise_nvlink"),
    "H100": ("h100", "h100_pairwise_nvlink"),
}
"""Device and node of collectives in Vidur's tables by name of the device."""


def check_profiled(model: str, device: str) -> None:
    """Raise ValueError if Vidur's tables have no measurements of the model or of the device."""
    tables: tuple[tuple[str, str, Mapping[str, object]], ...] = (
        ("model", model, PROFILED_MODELS),
        ("device", device, PROFILED_DEVICES),
    )
    for kind, name, table in tables:
        if name not in table:
            raise ValueError(
                f"{kind} {name!r} is not in Vidur's tables: choose from {', '.join(table)}"
            )


class TokenForestCostModel(CostModel):
    """Cost model with attention by the roofline model and other operators by Vidur's profiles.

    Args:
        model: Name of the model, from PROFILED_MODELS.
        device: Name of the device, from PROFILED_DEVICES.
        hardware: Shape of the same model, its stages on this device, and their links; all stages
            have the same tensor parallel size.

    Raises:
        ValueError: The model or the device was not profiled.
        ModuleNotFoundError: A random forest has to be fitted, and scikit-learn is missing.
    """

    def __init__(self, model: str, device: str, hardware: PipelineSpec) -> None:
        check_profiled(model, device)
        profiled_device, node = PROFILED_DEVICES[device]
        self._stages = hardware.stages
        tp = hardware.stages[0].tp
        self._layer = _tabulate_layer(profiled_device, PROFILED_MODELS[model], tp)
        token_bytes = hardware.model.hidden * BYTES_PER_ELEMENT
        self._reduce = _tabulate_collective(node, "all_reduce", tp, token_bytes)
        self._send = _tabulate_collective(node, "send_recv", 2, token_bytes)
        efficiency = DeviceEfficiency()
        self._host_seconds = efficiency.stage_overhead
        self._return_seconds = efficiency.return_overhead
        self._roofline = LayerRoofline(hardware.model, hardware.stages[0], efficiency)
        self._recent: tuple[StageWork | None, float] = None, 0.0
        tables = [self._layer, *filter(None, (self._reduce, self._send))]
        low, high = max(table.low for table in tables), min(table.high for table in tables)
        self._ranges = MeasuredRanges({TOKENS: (low, high)}, "Vidur's profile")

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the stage's layers, of the host, and of the LM head on the last stage.

        Raises:
            CostRangeError: The micro-batch has more tokens than were measured.
        """
        seconds = self._stages[stage].num_layers * self._layer_seconds(work) + self._host_seconds
        if stage == len(self._stages) - 1 and work.num_sampled_rows:
            seconds += self._roofline.head_seconds(work) + self._roofline.gather_seconds(work)
        return seconds

    def operator_seconds(self, stage: int, work: StageWork) -> Mapping[str, float]:
        """Return the time of each class of operators, which add up to `stage_seconds`."""
        tokens, layers = self._clamp(work), self._stages[stage].num_layers
        attention = self._roofline.seconds(work, False).attention
        sums = SUMS_PER_LAYER * self._reduce.at(tokens) * MS if self._reduce else 0.0
        parts = {
            "token operators": layers * self._layer.at(tokens) * MS,
            "attention": layers * attention,
            "collectives": layers * sums,
            "host": self._host_seconds,
        }
        return parts | {"lm_head": self.stage_seconds(stage, work) - sum(parts.values())}

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the time of one hidden state per token row."""
        assert self._send is not None, "transfers between two devices were measured"
        return TransferCost(self._send.at(self._clamp(work)) * MS)

    def sample_seconds(self, work: StageWork) -> float:
        """Return the fixed time of sampling."""
        return self._return_seconds

    def return_seconds(self, work: StageWork) -> float:
        """Return the fixed time of sampling and of the return to the driver."""
        return self._return_seconds

    def _layer_seconds(self, work: StageWork) -> float:
        """Return the time of one layer; stages predict the same micro-batch one after the other."""
        if self._recent[0] is not work:
            tokens = self._clamp(work)
            milliseconds = self._layer.at(tokens)
            if self._reduce is not None:
                milliseconds += SUMS_PER_LAYER * self._reduce.at(tokens)
            attention = self._roofline.seconds(work, False).attention
            self._recent = work, milliseconds * MS + attention
        return self._recent[1]

    def _clamp(self, work: StageWork) -> int:
        return int(self._ranges.clamp(TOKENS, work.num_tokens))


@cache
def _tabulate_layer(device: str, model: str, tp: int) -> TokenTable:
    """Return the milliseconds of all token-level operators of one layer."""
    tables = {
        name: TokenTable.of(samples)
        for name, samples in token_samples(device, model, tp).items()
        if name not in (EMBEDDING, HEAD)
    }
    # Two residuals per layer; the profile has the time of one.
    first, *others = (
        table.plus(table) if name == "add" else table for name, table in tables.items()
    )
    for table in others:
        first = first.plus(table)
    return first


@cache
def _tabulate_collective(
    node: str, collective: str, num_workers: int, token_bytes: int
) -> TokenTable | None:
    """Return the milliseconds of a collective by tokens; None for a single rank."""
    if num_workers == 1:
        return None
    samples = collective_samples(node, collective, num_workers, num_workers)
    return TokenTable.of(samples, token_bytes)
