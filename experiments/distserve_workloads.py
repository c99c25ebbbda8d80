"""Workloads of DistServe's evaluation: models, latency limits and placements of its tables.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), Table 1, section 6; placements of OPT-13B and
OPT-66B as in its artifact, OPT-175B as in the paper.
"""

from dataclasses import dataclass

from gllm.plan.goodput.engines import DISTSERVE_COSTS, VLLM_COSTS
from gllm.plan.goodput.systems import System
from gllm.plan.layout import Parallelism


@dataclass(frozen=True)
class PaperWorkload:
    """A row of Table 1, its placements and the paper's result."""

    name: str
    lengths: str
    model: str
    ttft: float
    """Limit in seconds."""
    tpot: float
    """Limit in seconds."""
    placement: tuple[Parallelism, Parallelism]
    """Engines of prefill and decode."""
    vllm: Parallelism
    candidates: tuple[Parallelism, ...]
    """Parallelism of one engine for both phases, of which the best is used."""
    rate_gain: tuple[float, float | None]
    """Change of the goodput against vLLM in the paper: 1.0 is twice as much; lowest and highest."""
    scale_gain: tuple[float, float | None]
    """The same of the limits: 1.0 is half of vLLM's."""

    @property
    def distserve(self) -> System:
        """Separate phases, as placed in the paper."""
        prefill, decode = self.placement
        return System("DistServe", self.model, DISTSERVE_COSTS, prefill, decode)

    @property
    def colocated(self) -> list[System]:
        """Baselines: vLLM, vLLM++ and the engine with DistServe's coefficients."""
        return [
            System("vLLM", self.model, VLLM_COSTS, self.vllm),
            *(System("vLLM++", self.model, VLLM_COSTS, candidate) for candidate in self.candidates),
            *(
                System("colocated", self.model, DISTSERVE_COSTS, candidate)
                for candidate in self.candidates
            ),
        ]


P = Parallelism
PLACEMENTS_66B = P(4, 1), P(2, 2)
CANDIDATES_66B = P(2, 2), P(4, 1), P(8, 1)
WORKLOADS = (
    PaperWorkload(
        "ShareGPT, OPT-13B", "sharegpt", "opt-13b", 0.2, 0.1,
        (P(2, 1), P(1, 1)), P(1), (P(1), P(2), P(4)), (1.0, 2.41), (0.4, 0.8),
    ),
    PaperWorkload(
        "ShareGPT, OPT-66B", "sharegpt", "opt-66b", 0.4, 0.1,
        PLACEMENTS_66B, P(4), CANDIDATES_66B, (1.0, 2.41), (0.4, 0.8),
    ),
    PaperWorkload(
        "ShareGPT, OPT-175B", "sharegpt", "opt-175b", 4.0, 0.2,
        (P(3, 3), P(4, 3)), P(8), (P(8), P(4, 2), P(4, 3)), (1.0, 2.41), (0.4, 0.8),
    ),
    PaperWorkload(
        "HumanEval, OPT-66B", "humaneval", "opt-66b", 0.125, 0.2,
        PLACEMENTS_66B, P(4), CANDIDATES_66B, (2.2, None), (0.5, None),
    ),
    PaperWorkload(
        "LongBench, OPT-66B", "longbench", "opt-66b", 15.0, 0.15,
        PLACEMENTS_66B, P(4), CANDIDATES_66B, (3.48, None), (9.2, None),
    ),
)  # fmt: skip
"""Gains of ShareGPT are the paper's range over its three models."""

TABLE_2_RATES = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
TABLE_2 = {
    "vLLM": (0.97, 0.655, 0.528, 0.449, 0.367, 0.278, 0.236),
    "DistServe": (1.0, 1.0, 0.993, 0.873, 0.83, 0.773, 0.70),
}
"""Attainment of the real systems by rate in requests per second."""
TABLE_2_SIMULATED = {
    "vLLM": (0.968, 0.651, 0.51, 0.461, 0.383, 0.28, 0.241),
    "DistServe": (1.0, 1.0, 0.993, 0.883, 0.841, 0.77, 0.689),
}
"""Attainment in DistServe's own simulator."""
MOTIVATION = {
    "colocated": System("colocated, same coefficients", "opt-13b", DISTSERVE_COSTS, P(1)),
    "vLLM": System("colocated, vLLM's coefficients", "opt-13b", VLLM_COSTS, P(1)),
    "2P1D": System("2 prefill, 1 decode", "opt-13b", DISTSERVE_COSTS, P(1), P(1), num_prefill=2),
}
"""Systems of the paper's Figure 1: OPT-13B, 512 prompt and 64 output tokens."""
MOTIVATION_LENGTHS = {"512 prompt and 64 output tokens": "fixed:512,64", "ShareGPT": "sharegpt"}
MOTIVATION_SLO = 0.2, 0.04
"""Limits of TTFT and TPOT in seconds. The paper's text does not state its own."""
MOTIVATION_GOODPUT = {"vLLM": 1.6, "prefill": 5.6, "decode": 10.0, "2P1D": 3.3}
"""Requests per second per GPU in the paper, whose colocated system is vLLM."""

HIGH_CANDIDATES = {
    "opt-13b": (P(1), P(1, 2), P(2), P(4)),
    "opt-66b": (P(2, 2), P(3), P(4), P(8)),
}
"""Parallelism that Algorithm 1 may choose for each phase, by model."""

TPOT_LIMITS = 0.1, 0.06, 0.04, 0.03
"""Limits in seconds of the comparison of separated with colocated engines, OPT-13B."""
COLOCATED_CHOICES = tuple(
    System(f"colocated, {policy}", "opt-13b", DISTSERVE_COSTS, P(tp), prefill_policy=policy)
    for policy in ("vllm", "sarathi")
    for tp in (1, 2, 4)
)
SEPARATED_CHOICES = tuple(
    System("separated", "opt-13b", DISTSERVE_COSTS, P(prefill), P(decode), num_prefill, num_decode)
    for prefill, decode, num_prefill, num_decode in (
        (2, 1, 1, 1),
        (2, 2, 1, 1),
        (2, 2, 2, 1),
        (4, 2, 1, 1),
        (4, 4, 1, 1),
    )
)
"""Engines of which the best of each kind are compared."""
