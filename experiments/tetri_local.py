"""TetriInfer's local scheduling: order of prompts within groups, admission of decodes.

Costs are DistServe's coefficients of OPT-13B on one A100-80G.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from experiments.claims import ExpectedChange, ExpectedLimit, PaperClaim, relative_change
from experiments.parallel import map_parallel
from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.cluster.handoffs import KvNetwork
from gllm.sim.cluster.paired import simulate_pairs
from gllm.sim.costs.base import CostModel, DecodeOnlyCostModel
from gllm.sim.costs.distserve import DistServeCostModel, read_coefficients
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.length_predictions import NoisyLengthPredictor
from gllm.sim.workloads.lengths import sample_lengths
from gllm.sim.workloads.requests import WorkloadRequest

MODEL = "opt-13b"
NUM_PROMPTS = 128
NUM_DECODES = 256
MAX_MODEL_LEN = 2400
"""Holds every request, prompt and output."""
AMPLE_BLOCKS = 20000
"""KV blocks of a cache that is never full."""
CAPACITIES = (4096, 8192, 16384)
"""KV tokens of the decode engine."""
RULES = ("greedy", "reserve-static", "reserve-dynamic")
ORDERS = {"fcfs": ("fcfs", 16), "sjf": ("sjf", 16), "ljf": ("ljf", 16), "sjf, 128": ("sjf", 128)}
"""Order and group size of the prompts."""
PAPER_ADMISSION = {"reserve-static": -0.10, "reserve-dynamic": -0.12}
"""Changes of the mean JCT against greedy with exact predictions."""
MAX_SJF, MAX_GROUPS = ExpectedLimit(-0.03), ExpectedLimit(-0.40)
"""Aims of the change of the mean TTFT: by SJF, and by groups of 128 in place of 16."""
MAX_PREEMPTIONS, MAX_JCT = ExpectedLimit(0.5), ExpectedLimit(-0.05)
"""Aims of reserve-dynamic with exact lengths: preemptions per one of greedy, change of the JCT."""
PREDICTORS = ("exact", "noisy")
"""Exact lengths; bins of 200 tokens that are right as often as the paper's (74.9 %)."""

LOCAL_NOTE = f"""\
OPT-13B on one A100-80G, DistServe's coefficients. *Prompts*: {NUM_PROMPTS} at once in groups of 16,
lengths lognormal(5.5, 1.3) within 4 to 2,047 tokens, or ShareGPT's; mean TTFT and its change
against `fcfs` (groups of 128: against `sjf` in groups of 16). *Decodes*: {NUM_DECODES} requests at
once, whose prompts take no time at the prefill engine and whose KV cache arrives at once; mean job
completion time (JCT) and preemptions by admission rule. A preempted request is computed again at
the decode engine, in chunks of 512 tokens: 0.1 s for 800 tokens, as long as swapping them out and
in at 13 GB/s. *noisy*: bins of 200 tokens, 74.9 % of them right."""


@dataclass(frozen=True)
class AdmissionCase:
    """Requests on a decode engine with little memory."""

    lengths: str
    """A name of LENGTHS."""
    capacity: int
    """KV tokens."""
    rule: str
    predictor: str = "exact"
    """A name of PREDICTORS."""
    seed: int = 0


@dataclass(frozen=True)
class AdmissionOutcome:
    """Figures of an AdmissionCase."""

    num_preemptions: int
    jct: float
    """Mean in seconds."""


def make_engine(config: SchedulerConfig, blocks: int, has_prefill: bool = True) -> Deployment:
    """Return an engine of one A100 with a number of KV blocks."""
    cost: CostModel = DistServeCostModel(
        read_coefficients("distserve", MODEL, 1), 1, extrapolates_context=True
    )
    if not has_prefill:
        cost = DecodeOnlyCostModel(cost)
    return Deployment(MODEL, [1], cost, config.resolve(1, blocks, MAX_MODEL_LEN))


def sample_prompts(lengths: str, seed: int) -> list[int]:
    """Return prompt lengths, `lognormal` or `sharegpt`."""
    if lengths == "sharegpt":
        return [prompt for prompt, _ in sample_lengths("sharegpt", NUM_PROMPTS, seed)]
    rng = Random(seed)
    return [min(2047, max(4, round(rng.lognormvariate(5.5, 1.3)))) for _ in range(NUM_PROMPTS)]


def prompt_ttft(order: str, prompts: Sequence[int]) -> float:
    """Return the mean TTFT in seconds of prompts that are there at once; a name of ORDERS."""
    name, group = ORDERS[order]
    config = SchedulerConfig(
        policy="tetri", prefill_order=name, prefill_group=group, prefix_cache=False
    )
    jobs = [WorkloadRequest(0.0, num_tokens, 1) for num_tokens in prompts]
    record = simulate(make_engine(config, AMPLE_BLOCKS), jobs)
    ttfts = [served.line.ttft for served in record.requests.values()]
    return fmean(ttft for ttft in ttfts if ttft is not None)


def sample_pairs(lengths: str, seed: int) -> list[tuple[int, int]]:
    """Return prompt and output lengths: half of each is heavy, or `sharegpt`."""
    if lengths == "sharegpt":
        pairs = sample_lengths("sharegpt", NUM_DECODES, seed)
        return [(prompt, max(2, output)) for prompt, output in pairs]
    rng = Random(seed)
    return [
        (
            rng.randint(*rng.choice(((8, 199), (513, 1499)))),
            rng.randint(*rng.choice(((8, 127), (129, 599)))),
        )
        for _ in range(NUM_DECODES)
    ]


def admit_decodes(case: AdmissionCase) -> AdmissionOutcome:
    """Simulate requests on a decode engine that cannot hold all of them."""
    jobs = [WorkloadRequest(0.0, *pair) for pair in sample_pairs(case.lengths, case.seed)]
    ample = SchedulerConfig(
        policy="tetri", prefix_cache=False, max_num_seqs=NUM_DECODES, async_scheduling=False
    )
    config = replace(ample, kv_admission=case.rule)
    rng = Random(case.seed)
    lengths = None if case.predictor == "exact" else NoisyLengthPredictor(rng)
    run = simulate_pairs(
        {
            "prefill": make_engine(ample, AMPLE_BLOCKS, has_prefill=False),
            "decode": make_engine(config, case.capacity // config.block_size),
        },
        {"prefill": "prefill", "decode": "decode"},
        jobs,
        make_pair_policy("tetri", rng),
        KvNetwork(NetworkLink(1e15, 0.0), 1),
        lengths=lengths,
    )
    requests = run.cluster.requests.values()
    jcts = [served.line.e2el for served in requests]
    return AdmissionOutcome(
        sum(served.num_preemptions for served in requests),
        fmean(jct for jct in jcts if jct is not None),
    )


def prompt_table() -> tuple[str, list[PaperClaim]]:
    """Return the mean TTFT by order of the prompts."""
    rows, claims = [], []
    for lengths in ("lognormal", "sharegpt"):
        prompts = sample_prompts(lengths, 0)
        ttfts = {order: prompt_ttft(order, prompts) for order in ORDERS}
        changes = {
            order: relative_change(ttft, ttfts["sjf" if order == "sjf, 128" else "fcfs"])
            for order, ttft in ttfts.items()
        }
        for order, ttft in ttfts.items():
            change = "" if order == "fcfs" else f"{100 * changes[order]:+.1f} %"
            rows.append([lengths, order, f"{ttft:.2f}", change])
        claims += [
            PaperClaim(f"{lengths}: TTFT of sjf", ExpectedChange(-0.078), changes["sjf"]),
            PaperClaim(
                f"{lengths}: TTFT of sjf, groups of 16 to 128",
                ExpectedChange(-0.465),
                changes["sjf, 128"],
            ),
            PaperClaim(f"{lengths}: TTFT of sjf", MAX_SJF, changes["sjf"]),
            PaperClaim(f"{lengths}: TTFT of sjf, groups of 128", MAX_GROUPS, changes["sjf, 128"]),
        ]
    return format_table(["lengths", "order", "TTFT, s", "change"], rows), claims


def admission_table(jobs: int, is_quick: bool) -> tuple[str, list[PaperClaim]]:
    """Return preemptions and JCT by rule, capacity and lengths.

    Args:
        jobs: Processes.
        is_quick: True for the largest capacity and exact predictions only.
    """
    capacities = CAPACITIES[-1:] if is_quick else CAPACITIES
    groups = [
        (lengths, capacity, predictor)
        for lengths in ("mixed", "sharegpt")
        for capacity in capacities
        for predictor in PREDICTORS
        if predictor == "exact" or (capacity == CAPACITIES[-1] and not is_quick)
    ]
    cases = [
        AdmissionCase(lengths, capacity, rule, predictor)
        for lengths, capacity, predictor in groups
        for rule in RULES
    ]
    outcomes = dict(zip(cases, map_parallel(admit_decodes, cases, jobs), strict=True))
    rows, claims = [], []
    for lengths, capacity, predictor in groups:
        base = outcomes[AdmissionCase(lengths, capacity, "greedy", predictor)]
        for rule in RULES:
            outcome = outcomes[AdmissionCase(lengths, capacity, rule, predictor)]
            change = relative_change(outcome.jct, base.jct)
            label = f"{lengths}, {capacity:,} tokens"
            shown = "" if rule == "greedy" else f"{100 * change:+.1f} %"
            preemptions = str(outcome.num_preemptions)
            rows.append([label, predictor, rule, preemptions, f"{outcome.jct:.1f}", shown])
            if rule in PAPER_ADMISSION and predictor == "exact":
                paper = ExpectedChange(PAPER_ADMISSION[rule])
                claims.append(PaperClaim(f"{label}: JCT of {rule}", paper, change))
            if rule == "reserve-dynamic" and predictor == "exact":
                share = outcome.num_preemptions / max(1, base.num_preemptions)
                claims += [
                    PaperClaim(f"{label}: preemptions of {rule}", MAX_PREEMPTIONS, share),
                    PaperClaim(f"{label}: JCT of {rule}", MAX_JCT, change),
                ]
    header = ["lengths, KV cache", "predictor", "rule", "preemptions", "JCT, s", "against greedy"]
    return format_table(header, rows), claims
