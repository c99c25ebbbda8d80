"""Aladdin in simulation: worker types, workers saved by placement, split decode, scaling rule."""

from dataclasses import replace
from statistics import fmean

from experiments.aladdin_cases import (
    DEVICE,
    EXAMPLE,
    EXAMPLE_MEMORY,
    KV_TOKENS,
    MAX_MODEL_LEN,
    MAX_WORKERS,
    QUICK_SECONDS,
    SLO,
    FleetRunTask,
    FleetSearchTask,
    example_peaks,
    measured_fit,
    run_fleet,
    search_fleet,
)
from experiments.aladdin_misses import format_misses
from experiments.aladdin_rebalancing import compare_rebalancing
from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedChange, ExpectedFigure, ExpectedLimit, PaperClaim
from experiments.parallel import map_parallel
from gllm.observability.latency import percentile
from gllm.plan.scale.fleet_size import FleetOutcome
from gllm.plan.scale.service_plan import mean_context
from gllm.plan.scale.worker_type import (
    DEGREES,
    best_worker,
    build_engines,
    throughput_by_degree,
)
from gllm.routing.scaling.autoscaler import ScaleRule, fit_scale_rule
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table

REFERENCE = '"Aladdin" (arXiv 2405.06856)'
TABLE_3 = {
    ("llama-2-70b", "A100-80G"): (0.075, 2),
    ("llama-2-13b", "A100-80G"): (0.030, 1),
    ("llama-2-13b", "V100"): (0.050, 2),
    ("llama-2-7b", "A100-80G"): (0.015, 1),
    ("llama-2-7b", "V100"): (0.030, 1),
}
"""T_dec in seconds (Table 2) and the best number of GPUs (Table 3), by model and device."""
LINKS_TRIED = ("nvlink", "pcie")
QUEUE = "least-tokens"
POLICIES = {"aladdin": "aladdin", QUEUE: "JSQ, tokens", "least-requests": "JSQ, requests"}
SPLIT_POLICIES = ("aladdin", QUEUE, "power-of-two")
WORKLOADS = {"sharegpt-like": 8.0, "sharegpt": 4.0, "azure-conv": 4.0}
"""Requests per second by workload."""
SPLIT_RATE = 24.0
RULE_RATES = (4.0, 6.0, 8.0, 10.0, 12.0)
NUM_SEEDS = 3
DEFAULT_GPUS = 8
"""GPUs of a worker of default vLLM: all of a machine."""

Outcomes = dict[FleetSearchTask, FleetOutcome | None]


def run(options: ExperimentOptions) -> ExperimentResult:
    """Search for the smallest fleet of each policy, then compare policies on equal fleets."""
    tasks = _tasks(options.quick)
    outcomes: Outcomes = dict(
        zip(
            tasks,
            map_parallel(search_fleet, tasks, options.jobs, options.progress, "fleet"),
            strict=True,
        )
    )
    runs = _equal_fleets(outcomes)
    shown = map_parallel(run_fleet, runs, options.jobs, options.progress)
    results = dict(zip(runs, shown, strict=True))
    types, type_claims = _type_table()
    rebalancing = compare_rebalancing(WORKLOADS, options)
    text = (
        f"{_setting()}\n\n## GPUs per worker\n\n{types}\n\n{TYPE_NOTE}\n\n"
        f"## Workers within the SLO\n\n{_fleet_table(outcomes)}\n\n"
        f"## Equal fleets\n\n{EQUAL_NOTE}\n\n{_equal_table(results)}\n\n"
        f"## Requests that miss\n\n{format_misses(WORKLOADS, options)}\n\n"
        f"## Re-balancing\n\n{rebalancing.text}\n\n"
        f"## Split phases: decode workers\n\n{_split_table(outcomes)}\n\n"
        f"## Scaling rule\n\n{_rule_table(outcomes)}\n\n## Example of placement\n\n{_example()}\n\n"
        f"## Misses\n\n{NOTES}"
    )
    return ExperimentResult(
        "Aladdin in simulation",
        text,
        [*type_claims, *_claims(outcomes, results), *rebalancing.claims],
        {"aladdin.svg": lambda path: plot_bars(_bars(outcomes), path, "workers", "", None)},
        reference=REFERENCE,
    )


def _tasks(quick: bool) -> list[FleetSearchTask]:
    if quick:
        base = FleetSearchTask("sharegpt-like", 4.0, "aladdin", seconds=QUICK_SECONDS)
        tasks = [replace(base, policy=policy) for policy in POLICIES]
        tasks += [replace(base, kind="decode", policy=policy) for policy in SPLIT_POLICIES]
        return [*tasks, replace(base, rate=6.0)]
    tasks = [
        FleetSearchTask(workload, rate, policy, seed, start=16 if workload == "azure-conv" else 6)
        for workload, rate in WORKLOADS.items()
        for policy in POLICIES
        for seed in range(NUM_SEEDS if (workload, policy) in SEEDED else 1)
    ]
    first = "sharegpt-like"
    tasks += [
        FleetSearchTask(first, rate, "aladdin") for rate in RULE_RATES if rate != WORKLOADS[first]
    ]
    tasks += [
        FleetSearchTask(first, SPLIT_RATE, policy, kind="decode", seconds=60.0)
        for policy in SPLIT_POLICIES
    ]
    tasks += [
        FleetSearchTask(first, WORKLOADS[first], QUEUE, kind=f"roofline-{DEFAULT_GPUS}", start=2),
        FleetSearchTask(first, WORKLOADS[first], "aladdin", kind="roofline-4", start=2),
        FleetSearchTask(first, WORKLOADS[first], "aladdin", attainment=1.0),
        FleetSearchTask(first, WORKLOADS[first], QUEUE, attainment=1.0, start=12),
    ]
    return tasks


SEEDED = (("sharegpt-like", "aladdin"), ("sharegpt-like", QUEUE))
"""Workloads and policies that are searched with several seeds."""
TYPE_NOTE = """\
Roofline times; the paper measured. *By memory*: tokens per second and GPU of the batch that fills
the KV cache; *by SLO*: of the largest batch within T_dec; the smaller of both counts (Eq. 5, 6).
The best number has a star. The paper does not name the links of its GPUs."""
EQUAL_NOTE = """\
Attainment of both limits and 99th percentile of ATGT on as many workers as `aladdin` needs for
99 %. *Without d*: a prompt is placed without regard to the slack of ongoing decodes."""
NOTES = f"""\
- *GPUs per worker* are mostly more than the paper's: in the roofline a step has a fixed time of the
  host's launches, which larger batches share, and memory for larger batches needs more GPUs. With
  slow links fewer GPUs win. Llama-2-7B on A100 meets 15 ms with no number: 32 layers take
  0.55 ms each for their launches.
- *Default vLLM* is read as workers of {DEFAULT_GPUS} GPUs behind the shortest queue. It is compared
  on roofline times with `aladdin` on workers of 4, the best number there.
- *JSQ* counts tokens, as Splitwise's does; by requests it needs fewer workers on these workloads.
- *sharegpt*: the requests that [miss](#requests-that-miss) have short outputs. While a prompt
  waits, others are placed behind it, which (c) alone limits; those that are computed after its
  first token delay the second. Long outputs make up for that. More workers do not help: best fit
  packs prompts as on fewer. The paper computes all prompts of a heartbeat together.
- *Split decode*: workers are equal and requests many, so the shortest queue fills all of them as
  evenly as best fit fills the fewest.
- *A fixed number of workers*: where no worker meets the constraints, the least loaded gets the
  request. The paper opens a worker instead."""


def _setting() -> str:
    fit = measured_fit()
    model = fit.model
    return f"""Simulated. Llama-2-70B on workers of two {DEVICE}; steps take what the linear model
takes that is fitted to Vidur's profile ([data](../../gllm/sim/data/README.md)): k1
{1e3 * model.k1:.4f} ms, c1 {1e3 * model.c1:.1f} ms, k2 {1e9 * model.k2:.1f} ns, c2
{1e3 * model.c2:.3f} ms, c3 {1e3 * model.c3:.1f} ms; errors on the profile: prefill mean
{fit.prefill_mean_error:.1%}, largest {fit.prefill_max_error:.1%}, decode mean
{fit.decode_mean_error:.1%}, largest {fit.decode_max_error:.1%}. KV cache: {KV_TOKENS:,} tokens.
SLO: TTFT {SLO.ttft_seconds} s and ATGT {SLO.tpot_seconds} s, kept by 99 % of the requests.
Poisson arrivals over 120 s; requests of up to 4,096 tokens; prompts first, as in vLLM. `aladdin`
predicts outputs
from 2,000 earlier requests by the length of the prompt, with theta 0.8 and gamma 0.5."""


def _type_table() -> tuple[str, list[PaperClaim]]:
    """Return the throughput per GPU of each number of GPUs, and the claims of Table 3."""
    context = mean_context("sharegpt")
    rows, claims = [], []
    for (model, device), (tpot, paper) in TABLE_3.items():
        for link in LINKS_TRIED:
            engines, _ = build_engines(model, device, link, DEGREES, MAX_MODEL_LEN)
            workers = throughput_by_degree(engines, tpot, context)
            best = best_worker(workers)
            cells = [
                f"{worker.num_gpus}: {worker.memory_rate:.0f} / {worker.slo_rate:.0f}"
                f"{' *' if worker == best and best.rate else ''}"
                for worker in workers
            ]
            rows.append([model, device, link, str(paper), "; ".join(cells)])
            if link == "nvlink":
                claims.append(
                    PaperClaim(
                        f"GPUs per worker, {model} on {device}", str(paper),
                        note=str(best.num_gpus) if best.rate else "none meets T_dec",
                    )
                )  # fmt: skip
    header = ["model", "device", "link", "paper", "GPUs: tokens/s/GPU by memory / by SLO"]
    return format_table(header, rows), claims


def _counts(outcomes: Outcomes, workload: str, rate: float, policy: str) -> list[int | None]:
    """Return the workers of each seed; None for more than MAX_WORKERS."""
    return [
        None if outcome is None else outcome.num_workers
        for task, outcome in outcomes.items()
        if (task.workload, task.rate, task.policy, task.kind, task.attainment)
        == (workload, rate, policy, "measured", FleetSearchTask.attainment)
    ]


def _show(counts: list[int | None]) -> str:
    return ", ".join(f"> {MAX_WORKERS}" if count is None else str(count) for count in counts)


def _settings(outcomes: Outcomes) -> list[tuple[str, float]]:
    compared = [
        (task.workload, task.rate) for task in outcomes
        if task.policy == QUEUE and task.kind == "measured"
    ]  # fmt: skip
    return list(dict.fromkeys(compared))


def _fleet_table(outcomes: Outcomes) -> str:
    rows = [
        [
            workload, f"{rate:g}",
            *(_show(_counts(outcomes, workload, rate, policy)) for policy in POLICIES),
        ]
        for workload, rate in _settings(outcomes)
    ]  # fmt: skip
    table = format_table(["workload", "requests/s", *POLICIES.values()], rows)
    full = [
        f"{POLICIES[task.policy]}: {_show([None if each is None else each.num_workers])}"
        for task, each in outcomes.items()
        if task.attainment == 1.0
    ]
    gpus = [
        f"{POLICIES[task.policy]} on workers of {task.kind.rpartition('-')[2]} GPUs (roofline): "
        f"{_show([None if each is None else each.num_workers])}"
        for task, each in outcomes.items()
        if task.kind.startswith("roofline")
    ]
    extra = "".join(f"\n- {line}" for line in gpus)
    if full:
        extra += f"\n- all requests within the SLO, sharegpt-like: {'; '.join(full)}"
    return f"Several numbers: one per seed.\n\n{table}\n{extra}"


def _equal_fleets(outcomes: Outcomes) -> list[FleetRunTask]:
    """Return the runs of all policies on the fleet that `aladdin` needs, first seeds only."""
    runs = []
    for workload, rate in _settings(outcomes):
        task = next(
            outcome for outcome in outcomes
            if (outcome.workload, outcome.rate, outcome.policy) == (workload, rate, "aladdin")
            and outcome.kind == "measured"
        )  # fmt: skip
        outcome = outcomes[task]
        if outcome is not None:
            runs += [
                FleetRunTask(replace(task, policy=policy), outcome.num_workers)
                for policy in POLICIES
            ]
            runs.append(FleetRunTask(task, outcome.num_workers, without="d"))
    return runs


def _equal_table(results: dict[FleetRunTask, FleetOutcome]) -> str:
    rows = []
    for task, outcome in results.items():
        name = POLICIES[task.search.policy] + (f" without {task.without}" if task.without else "")
        rows.append(
            [
                task.search.workload, str(task.num_workers), name,
                f"{outcome.attainment:.1%}", f"{outcome.ttft_attainment:.1%}",
                f"{1e3 * percentile(outcome.tpots, 99):.1f}",
            ]
        )  # fmt: skip
    header = ["workload", "workers", "policy", "both", "TTFT", "P99 ATGT, ms"]
    return format_table(header, rows)


def _split(outcomes: Outcomes) -> dict[str, int | None]:
    return {
        task.policy: None if outcome is None else outcome.num_workers
        for task, outcome in outcomes.items()
        if task.kind == "decode"
    }


def _split_table(outcomes: Outcomes) -> str:
    rate = next(task.rate for task in outcomes if task.kind == "decode")
    rows = [[policy, _show([count])] for policy, count in _split(outcomes).items()]
    table = format_table(["policy", "decode workers"], rows)
    return (
        f"{rate:g} requests/s of sharegpt-like arrive with their KV cache; only ATGT is limited. "
        f"`aladdin` checks constraints b and e.\n\n{table}"
    )


def _rule(outcomes: Outcomes) -> tuple[ScaleRule, list[tuple[float, int]]]:
    points = sorted(
        (task.rate, outcome.num_workers)
        for task, outcome in outcomes.items()
        if (task.workload, task.policy, task.kind, task.seed)
        == ("sharegpt-like", "aladdin", "measured", 0)
        and task.attainment == FleetSearchTask.attainment and outcome is not None
    )  # fmt: skip
    return fit_scale_rule(points), points


def _rule_table(outcomes: Outcomes) -> str:
    rule, points = _rule(outcomes)
    rows = [[f"{rate:g}", str(count), str(rule.num_engines(rate))] for rate, count in points]
    table = format_table(["requests/s", "workers, simulated", "by the rule"], rows)
    return f"ceil({rule.k5:.3f} rate {rule.c5:+.3f}), sharegpt-like.\n\n{table}"


def _example() -> str:
    queue, best = example_peaks()
    lengths = ", ".join(
        f"{each.num_prompt_tokens} + {each.num_expected_tokens}" for each in EXAMPLE
    )
    return (
        f"Requests of {lengths} tokens (prompt + output), two workers of {EXAMPLE_MEMORY} tokens: "
        f"the shortest queue fills one worker with {queue:g}, the best placement with {best:g}. "
        "The figures are those of the paper's Fig. 3, the requests are ours."
    )


def saving_claim(
    quantity: str, paper: float, ours: list[int | None], base: list[int | None]
) -> PaperClaim:
    """Return the claim on the relative change of the mean number of workers, over the seeds.

    More than MAX_WORKERS, None, count as that many: a policy that fails loses. Where both fail
    nothing is judged.
    """
    expected = ExpectedChange(paper)
    if not ours or not base or (None in ours and None in base):
        return PaperClaim(quantity, expected, None, "both fail" if ours and base else "")
    workers, others = (
        fmean(MAX_WORKERS if each is None else each for each in counts) for counts in (ours, base)
    )
    note = f"at least, > {MAX_WORKERS} workers" if None in ours else ""
    return PaperClaim(quantity, expected, workers / others - 1, note)


def _claims(outcomes: Outcomes, results: dict[FleetRunTask, FleetOutcome]) -> list[PaperClaim]:
    claims = []
    for workload, rate in _settings(outcomes):
        ours, queue = (_counts(outcomes, workload, rate, each) for each in ("aladdin", QUEUE))
        claims.append(saving_claim(f"GPUs against JSQ, {workload}", -0.40, ours, queue))
    split = _split(outcomes)
    for policy, paper in ((QUEUE, -0.60), ("power-of-two", -0.49)):
        counts = [split["aladdin"]], [split[policy]]
        claims.append(saving_claim(f"split decode against {policy}", paper, *counts))
    default = {
        task.policy: outcome.num_workers * int(task.kind.rpartition("-")[2])
        for task, outcome in outcomes.items()
        if task.kind.startswith("roofline") and outcome is not None
    }
    if len(default) == 2:
        change = default["aladdin"] / default[QUEUE] - 1
        claims.append(PaperClaim("GPUs against default vLLM", ExpectedChange(-0.71), change))
    claims += _attainment_claims(results)
    rule, points = _rule(outcomes)
    error = max(abs(rule.num_engines(rate) - count) for rate, count in points)
    limit = ExpectedLimit(1.0, unit="workers", digits=0)
    claims.append(PaperClaim("largest error of the scaling rule", limit, float(error)))
    queue_peak, best_peak = example_peaks()
    claims.append(PaperClaim("Fig. 3, peak by JSQ", ExpectedFigure(10, "tokens", 0), queue_peak))
    claims.append(PaperClaim("Fig. 3, best peak", ExpectedFigure(7, "tokens", 0), best_peak))
    return claims


def _attainment_claims(results: dict[FleetRunTask, FleetOutcome]) -> list[PaperClaim]:
    """Return the claims about violations and P99 ATGT on equal fleets of the first workload."""
    first = next(iter(results)).search.workload
    by_policy = {
        task.search.policy: outcome
        for task, outcome in results.items()
        if task.search.workload == first and not task.without
    }
    ours, queue = by_policy["aladdin"], by_policy[QUEUE]
    worst = [percentile(our.tpots, 99) for our in (ours, queue)]
    violations = [1 - our.attainment for our in (ours, queue)]
    change = violations[0] / violations[1] - 1 if violations[1] else None
    careless = next(outcome for task, outcome in results.items() if task.without == "d")
    return [
        PaperClaim("violations against JSQ", ExpectedChange(1 / 3.5 - 1), change),
        PaperClaim("P99 ATGT against JSQ", ExpectedChange(-0.40), worst[0] / worst[1] - 1),
        PaperClaim(
            "attainment lost without constraint d",
            ExpectedLimit(0.30, is_minimum=True),
            ours.attainment - careless.attainment,
        ),
    ]


def _bars(outcomes: Outcomes) -> dict[str, dict[str, float]]:
    """Return the mean number of workers by workload and policy."""
    return {
        workload: {
            title: fmean(
                MAX_WORKERS if count is None else count
                for count in _counts(outcomes, workload, rate, policy)
            )
            for policy, title in POLICIES.items()
        }
        for workload, rate in _settings(outcomes)
    }
