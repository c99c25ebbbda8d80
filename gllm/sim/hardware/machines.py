"""Machine types with price and power, and clusters of prompt and token machines.

Source: Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677), Tables I and V. The figures are in
gllm/sim/data/splitwise_machines.csv, relative to a DGX-A100 = 1. Table I's InfiniBand of 200 and
400 GB/s is that of eight cards of 200 and 400 Gbit/s; its NVLink has Gbit/s where GB/s are meant.
Table V gives an H100 machine another relative cost than Table I, whose cost the searches take.
"""

import math
from functools import cache
from typing import NamedTuple

from gllm.sim.data_tables import read_table
from gllm.sim.hardware.devices import NetworkLink

MACHINES_FILE = "splitwise_machines.csv"
GBIT = 1e9 / 8
"""Bytes per gigabit."""


class MachineType(NamedTuple):
    """Specification of a multi-GPU machine in the Splitwise paper, with price, cost and power."""

    name: str
    device: str
    """Name of the device in Splitwise's measurements."""
    num_gpus: int
    gpu_memory_gb: float
    dollars_per_hour: float
    cost: float
    """Cost relative to a DGX-A100 (Splitwise, Table I)."""
    power: float
    """Power relative to a DGX-A100."""
    link: NetworkLink
    """Total bandwidth of the network cards, one per GPU, with a latency of 0."""

    @property
    def memory_bytes(self) -> float:
        """Memory of all GPUs in bytes."""
        return self.num_gpus * self.gpu_memory_gb * 1e9

    def kv_tokens(self, weight_bytes: float, kv_bytes_per_token: float, usable: float) -> int:
        """Return the capacity of the KV cache in tokens, after the weights are loaded.

        Args:
            weight_bytes: All weights of the model.
            kv_bytes_per_token: KV cache of one token over all layers.
            usable: Share of the memory for weights and KV cache.

        Raises:
            ValueError: The weights do not fit.
        """
        free_bytes = usable * self.memory_bytes - weight_bytes
        if free_bytes < kv_bytes_per_token:
            raise ValueError(
                f"{weight_bytes / 1e9:.0f} GB of weights do not fit {self.name}, of whose "
                f"{self.memory_bytes / 1e9:.0f} GB {usable:.0%} are usable: choose another model"
            )
        return int(free_bytes / kv_bytes_per_token)


@cache
def read_machine_types() -> dict[str, MachineType]:
    """Return the machine types of the Splitwise paper by name, such as DGX-A100."""
    machines = {}
    for row in read_table(MACHINES_FILE):
        machines[row["machine"]] = MachineType(
            row["machine"],
            row["device"],
            int(row["num_gpus"]),
            float(row["gpu_memory_gb"]),
            float(row["dollars_per_hour"]),
            float(row["relative_cost"]),
            float(row["relative_power"]),
            NetworkLink(int(row["num_gpus"]) * float(row["nic_gbit_per_s"]) * GBIT, 0.0),
        )
    return machines


class ClusterDesign(NamedTuple):
    """Numbers and types of the prefill and decode machines of a cluster (Splitwise).

    Without decode machines, each machine computes whole requests.
    """

    prompt: MachineType
    token: MachineType
    num_prompt: int
    num_token: int

    @property
    def num_machines(self) -> int:
        """Total number of machines."""
        return self.num_prompt + self.num_token

    @property
    def cost(self) -> float:
        """Cost relative to one DGX-A100."""
        return self.num_prompt * self.prompt.cost + self.num_token * self.token.cost

    @property
    def dollars_per_hour(self) -> float:
        """Price of all machines in US dollars per hour."""
        prompt = self.num_prompt * self.prompt.dollars_per_hour
        return prompt + self.num_token * self.token.dollars_per_hour

    @property
    def power(self) -> float:
        """Provisioned power relative to one DGX-A100."""
        return self.num_prompt * self.prompt.power + self.num_token * self.token.power

    def __str__(self) -> str:
        if not self.num_token:
            return f"{self.num_prompt} x {self.prompt.name}"
        return f"{self.num_prompt}P/{self.num_token}T"


def machine_pair(name: str) -> tuple[MachineType, MachineType]:
    """Return the machine types for prefill and for decode of a cluster design of Splitwise.

    Args:
        name: AA (A100 for both), HH (H100 for both), HA (H100 and A100) or HHcap (H100, and H100
            with a power limit).

    Raises:
        ValueError: There is no such design.
    """
    machines = read_machine_types()
    a100, h100, capped = machines["DGX-A100"], machines["DGX-H100"], machines["DGX-H100-cap"]
    pairs = {"AA": (a100, a100), "HH": (h100, h100), "HA": (h100, a100), "HHcap": (h100, capped)}
    if name not in pairs:
        raise ValueError(f"design {name!r} is none of {', '.join(pairs)}")
    return pairs[name]


def count_affordable(budget: float, price: float) -> int:
    """Return how many machines a budget pays for, allowing for floating-point rounding.

    Args:
        budget: Available amount, in the unit of the price.
        price: Price of one machine.
    """
    return math.floor(budget / price + 1e-9)
