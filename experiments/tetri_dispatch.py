"""TetriInfer's dispatcher: heavy decodes spread over decode engines.

Sources: "Inference without Interference" (TetriInfer, arXiv 2401.11181), section 3.3.4; ShareGPT's
lengths are those of DistServe's run.
"""

from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean

from experiments.claims import ExpectedLimit, PaperClaim
from gllm.routing.disaggregation.pair_loads import HEAVY_TOKENS
from gllm.routing.disaggregation.policy import PairPolicy, PairRequest
from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.routing.state import EngineSnapshot
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.lengths import sample_lengths

REQUESTS_PER_INSTANCE, HEAVY_SHARE = 32, 0.5
NUM_INSTANCES = range(2, 9)
MOST_HEAVY = 18.0
"""Aim: mean of the most heavy decodes on one engine, of which 16 are ideal."""
LENGTHS = ("half heavy", "sharegpt")
"""Outputs: half of them heavy; or ShareGPT's, of which those above 128 tokens are heavy."""
DISPATCH_NOTE = f"""\
{REQUESTS_PER_INSTANCE} requests per decode engine, half of them with heavy outputs or ShareGPT's
(heavy above {HEAVY_TOKENS} tokens), on 2 to 8 engines: the most heavy decodes on one engine, mean
over seeds. *even* spreads them evenly, {REQUESTS_PER_INSTANCE // 2} where half are heavy. *po2*:
the policy `tetri` of the router. *ratio*: the paper's rule as it reads, the lower heavy:light ratio
of two random engines. *imbalance*: heavy decodes fill one engine after another, the worst of all
assignments."""
Dispatch = Callable[[int, Sequence[bool], Random], int]
"""Returns the most heavy decodes on one of a number of engines, by the kinds of the requests."""


def dispatch_with(policy: PairPolicy, num_engines: int, kinds: Sequence[bool]) -> int:
    """Return the most heavy decodes on one engine under a pair policy."""
    engines = [EngineSnapshot("prefill", role="prefill", num_blocks=10**6)]
    engines += [
        EngineSnapshot(f"decode-{index}", role="decode", num_blocks=10**6)
        for index in range(num_engines)
    ]
    counts = dict.fromkeys((engine.name for engine in engines), 0)
    for key, is_heavy in enumerate(kinds):
        output = HEAVY_TOKENS * 2 if is_heavy else HEAVY_TOKENS // 2
        request = PairRequest(key, 100, output)
        policy.choose(request, engines, 0.0)
        name = policy.choose_decode(request, engines, 0.0)
        assert name is not None
        counts[name] += is_heavy
    return max(counts.values())


def sample_kinds(num_engines: int, lengths: str, seed: int) -> list[bool]:
    """Return the kinds of all requests, True for heavy ones, in random order.

    Args:
        num_engines: Decode engines.
        lengths: A name of LENGTHS.
        seed: Seed of lengths and order.
    """
    total = REQUESTS_PER_INSTANCE * num_engines
    if lengths == "sharegpt":
        return [output > HEAVY_TOKENS for _, output in sample_lengths("sharegpt", total, seed)]
    kinds = [index < HEAVY_SHARE * total for index in range(total)]
    Random(seed).shuffle(kinds)
    return kinds


def _by_po2(num_engines: int, kinds: Sequence[bool], rng: Random) -> int:
    return dispatch_with(make_pair_policy("tetri", rng), num_engines, kinds)


def _at_random(num_engines: int, kinds: Sequence[bool], rng: Random) -> int:
    counts = [0] * num_engines
    for is_heavy in kinds:
        counts[rng.randrange(num_engines)] += is_heavy
    return max(counts)


def _by_ratio(num_engines: int, kinds: Sequence[bool], rng: Random) -> int:
    heavy, light = [0] * num_engines, [0] * num_engines
    for is_heavy in kinds:
        pair = rng.sample(range(num_engines), 2)
        best = min(pair, key=lambda index: heavy[index] / max(1, light[index]))
        (heavy if is_heavy else light)[best] += 1
    return max(heavy)


def _imbalanced(num_engines: int, kinds: Sequence[bool], rng: Random) -> int:
    return min(REQUESTS_PER_INSTANCE, sum(kinds))


def _even(num_engines: int, kinds: Sequence[bool], rng: Random) -> int:
    return -(-sum(kinds) // num_engines)


DISPATCHERS: dict[str, Dispatch] = {
    "po2": _by_po2,
    "random": _at_random,
    "ratio": _by_ratio,
    "imbalance": _imbalanced,
    "even": _even,
}


def mean_most_heavy(
    name: str, num_engines: int, num_seeds: int, lengths: str = LENGTHS[0]
) -> float:
    """Return the mean over seeds of the most heavy decodes on one engine.

    Args:
        name: A name of DISPATCHERS.
        num_engines: Decode engines.
        num_seeds: Seeds, from 0.
        lengths: A name of LENGTHS.
    """
    return fmean(
        DISPATCHERS[name](num_engines, sample_kinds(num_engines, lengths, seed), Random(seed))
        for seed in range(num_seeds)
    )


def dispatch_table(num_seeds: int) -> tuple[str, list[PaperClaim]]:
    """Return the most heavy decodes on one engine by dispatcher, and the worst of them."""
    rows, claims = [], []
    for lengths in LENGTHS:
        most = []
        for count in NUM_INSTANCES:
            means = [mean_most_heavy(name, count, num_seeds, lengths) for name in DISPATCHERS]
            rows.append([lengths, str(count), *(f"{mean:.1f}" for mean in means)])
            most.append(dict(zip(DISPATCHERS, means, strict=True)))
        if lengths == LENGTHS[0]:
            worst = max(each["po2"] for each in most)
            aim = ExpectedLimit(MOST_HEAVY, unit="")
            claims.append(PaperClaim("dispatch, half heavy: most heavy decodes", aim, worst))
        gains = max(each["po2"] / each["random"] for each in most)
        below = ExpectedLimit(1.0, unit="x", digits=2)
        claims.append(PaperClaim(f"dispatch, {lengths}: po2 beside random", below, gains))
        spread = min(each["imbalance"] for each in most)
        if lengths == LENGTHS[0]:
            aim = ExpectedLimit(30.0, is_minimum=True, unit="")
            claims.append(PaperClaim("dispatch, half heavy: imbalance", aim, spread))
    return format_table(["lengths", "decode engines", *DISPATCHERS], rows), claims
