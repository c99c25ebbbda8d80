"""TetriInfer's workloads on OPT-13B with V100s: one prefill and one decode engine, or colocated.

Costs are DistServe's coefficients of OPT-13B at TP 2 on A100-80G, scaled to V100 by the ratios of
the data sheets: reads of weights and KV cache by memory bandwidth, prompts by peak FLOP/s.
"""

from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.cluster.cluster import ClusterRun, simulate_cluster
from gllm.sim.cluster.handoffs import KvNetwork
from gllm.sim.cluster.paired import simulate_pairs
from gllm.sim.cluster.router import make_router
from gllm.sim.costs.distserve import (
    DistServeCoefficients,
    DistServeCostModel,
    PhaseCoefficients,
    read_coefficients,
)
from gllm.sim.deployment import Deployment
from gllm.sim.hardware.devices import DEVICES, NetworkLink
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.hardware.stages import split_layers_evenly
from gllm.sim.workloads.lengths import sample_lengths
from gllm.sim.workloads.requests import WorkloadRequest

MODEL, NUM_GPUS = "opt-13b", 2
NUM_REQUESTS = 128
"""Requests of a run; all are there at once."""
CAP = 16
"""Requests of a batch of the capped baseline."""
UNCAPPED = 256
HEAVY_PROMPT, HEAVY_OUTPUT = 512, 128
"""A prompt or an output above it is heavy."""
MAX_MODEL_LEN = 2048
USABLE_SHARE = 0.9
LINKS = {"NVLink, 300 GB/s": 300e9, "network, 200 Gbit/s": 25e9}
"""Mock transfers of the paper, bytes per second."""
PROMPTS = {"L": (8, 199), "H": (513, 1499)}
OUTPUTS = {"L": (8, 127), "H": (129, 599)}
"""Uniform lengths of light and heavy requests, both ends included."""
CLASSES = ("LPLD", "LPHD", "HPLD", "HPHD", "Mixed")
"""Light or heavy prefill, light or heavy decode; Mixed: a quarter of each."""
LENGTHS = ("uniform", "sharegpt")
SYSTEMS = {
    "tetri": (SchedulerConfig(preset="tetri"), 1),
    "tetri, fcfs, greedy": (
        SchedulerConfig(policy="tetri", prefill_order="fcfs", kv_admission="greedy"), 1,
    ),
    "tetri, PP 2": (SchedulerConfig(preset="tetri"), 2),
    "throttle, PP 2": (SchedulerConfig(policy="throttle"), 2),
}  # fmt: skip
"""Options and stages of the engines of split systems; all have the pair policy `tetri`."""


@dataclass(frozen=True)
class TetriCase:
    """One simulation."""

    workload: str
    """A name of CLASSES."""
    lengths: str
    """A name of LENGTHS."""
    system: str
    """A name of SYSTEMS, or `colocated`."""
    max_num_seqs: int = UNCAPPED
    """Requests of a decode batch."""
    link: str = "NVLink, 300 GB/s"
    num_colocated: int = 2
    """Engines of the baseline; TetriInfer has one of each kind."""
    seed: int = 0
    requests: int = NUM_REQUESTS


@dataclass(frozen=True)
class TetriOutcome:
    """Means over the requests in seconds, and the computing time of all engines."""

    ttft: float
    jct: float
    resource: float


def sample_jobs(
    workload: str, lengths: str, seed: int, requests: int = NUM_REQUESTS
) -> list[WorkloadRequest]:
    """Return requests of one class that are all there at the beginning.

    Args:
        workload: A name of CLASSES.
        lengths: A name of LENGTHS; ShareGPT's lengths are sorted into the classes.
        seed: Seed of the lengths.
        requests: Number of requests.
    """
    rng = Random(seed)
    classes = CLASSES[:4] if workload == "Mixed" else (workload,)
    pools: dict[str, list[tuple[int, int]]] = {name: [] for name in classes}
    if lengths == "sharegpt":
        for prompt, output in sample_lengths("sharegpt", 1600, seed):
            name = (
                f"{'H' if prompt > HEAVY_PROMPT else 'L'}P{'H' if output > HEAVY_OUTPUT else 'L'}D"
            )
            if name in pools:
                pools[name].append((prompt, output))
    jobs = []
    for index in range(requests):
        name = classes[index % len(classes)]
        if lengths == "sharegpt":
            pair = rng.choice(pools[name])
        else:
            pair = rng.randint(*PROMPTS[name[0]]), rng.randint(*OUTPUTS[name[2]])
        jobs.append(WorkloadRequest(0.0, *pair))
    rng.shuffle(jobs)
    return jobs


def scale_to_v100(coefficients: DistServeCoefficients) -> DistServeCoefficients:
    """Return coefficients of an A100-80G on a V100, without ranges."""
    a100, v100 = DEVICES["A100-80G"], DEVICES["V100"]
    memory, compute = a100.bandwidth / v100.bandwidth, a100.flops / v100.flops

    def scale(phase: PhaseCoefficients, rest: float) -> PhaseCoefficients:
        return PhaseCoefficients(
            phase.constant * memory, phase.per_token * rest, phase.third * rest
        )

    return DistServeCoefficients(
        scale(coefficients.prefill, compute),
        scale(coefficients.small_decode, memory),
        scale(coefficients.large_decode, memory),
        coefficients.batch_threshold,
        {},
    )


def build_engine(config: SchedulerConfig, pp: int = 1) -> Deployment:
    """Return an engine of two V100-32G, as ranks of one stage or as stages."""
    shape = MODELS[MODEL]
    tp = NUM_GPUS // pp
    config = replace(
        config, max_num_seqs=config.max_num_seqs or UNCAPPED, prefix_cache=False,
        async_scheduling=False,
    )  # fmt: skip
    weights = shape.parameters * shape.bytes_per_weight
    free = USABLE_SHARE * NUM_GPUS * DEVICES["V100"].memory - weights
    blocks = int(free / (shape.layers * shape.kv_bytes * config.block_size))
    coefficients = scale_to_v100(read_coefficients("distserve", MODEL, tp))
    cost = DistServeCostModel(coefficients, pp)
    layers = split_layers_evenly(shape.layers, pp)
    return Deployment(MODEL, layers, cost, config.resolve(pp, blocks, MAX_MODEL_LEN))


def simulate_case(case: TetriCase) -> TetriOutcome:
    """Simulate a case."""
    jobs = sample_jobs(case.workload, case.lengths, case.seed, case.requests)
    if case.system == "colocated":
        config = SchedulerConfig(
            policy="vllm", max_num_seqs=case.max_num_seqs, max_num_batched_tokens=MAX_MODEL_LEN
        )
        engines = {f"engine-{i}": build_engine(config) for i in range(case.num_colocated)}
        router = make_router("least-requests", case.seed)
        return _measure(simulate_cluster(engines, jobs, router))
    config, pp = SYSTEMS[case.system]
    config = replace(config, max_num_seqs=case.max_num_seqs)
    shape = MODELS[MODEL]
    run = simulate_pairs(
        {role: build_engine(config, pp) for role in ("prefill", "decode")},
        {"prefill": "prefill", "decode": "decode"},
        jobs,
        make_pair_policy("tetri", Random(case.seed)),
        KvNetwork(NetworkLink(LINKS[case.link], 0.0), shape.layers * shape.kv_bytes),
    )
    return _measure(run.cluster)


def _measure(run: ClusterRun) -> TetriOutcome:
    lines = [served.line for served in run.requests.values()]
    ttfts = [line.ttft for line in lines if line.ttft is not None]
    jcts = [line.e2el for line in lines if line.e2el is not None]
    return TetriOutcome(fmean(ttfts), fmean(jcts), run.busy_seconds())
