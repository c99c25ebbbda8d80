"""Splitwise in simulation: single machines, and the clusters that its search finds."""

from dataclasses import dataclass

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.parallel import map_parallel
from experiments.splitwise_designs import (
    BASELINES,
    DESIGNS,
    POLICY,
    BatchTask,
    BorderOutcome,
    BorderTask,
    SearchTask,
    batch_rate,
    llama_rate,
    search_border,
    search_design,
)
from experiments.splitwise_full import NOTE as FULL_NOTE
from experiments.splitwise_full import (
    FullRow,
    full_size_claims,
    full_size_table,
    measure_full_size,
)
from experiments.splitwise_mixed import NOTE as MIXED_NOTE
from experiments.splitwise_mixed import MixedTask, mixed_rate, mixed_table, mixed_tasks
from experiments.splitwise_phases import (
    next_turn_table,
    perf_model_table,
    second_token_table,
    table_iv,
)
from experiments.splitwise_tables import (
    Batches,
    Outcomes,
    batch_table,
    border_table,
    cluster_claims,
    llama_table,
    plot_rates,
    search_table,
)
from experiments.splitwise_throttle import NOTE as THROTTLE_NOTE
from experiments.splitwise_throttle import (
    ThrottleTask,
    throttle_rate,
    throttle_table,
    throttle_tasks,
)
from gllm.plan.pools.clusters import (
    MIN_SECONDS,
    WORKLOADS,
    SampleSize,
    fluid_rate,
    mean_workload_lengths,
)

TABLE_IV_NOTE = """\
Llama-2-70B at TP 8 without batching, at the median lengths of Table III. Ours: the performance
model. The paper's figures of cost are cents, though it prints dollars: 4.957 s of a machine for
17.6 $/h are 2.4 cents. Its energies are 5.75 kW for a DGX-A100; ours take this power."""
SECOND_NOTE = """\
A prompt of 1,500 tokens. Serialised: all layers are sent after the prompt, over all eight network
cards. Per layer: only the last layer is sent after it, by bandwidth alone; the paper measured 8
ms (DGX-A100) and 5 ms (DGX-H100), mostly synchronization, which a bandwidth does not have: the
last column has its share. The paper's +64 % and +16.5 % are one figure for all machines."""
NEXT_TURN_NOTE = """\
A conversation goes on with 200 new tokens, and its KV cache is on a token machine: the prompt
machine computes all tokens again, or gets the cache back (serialised, over all eight network cards)
and computes the new ones, whose time does not count their longer context. The paper proposes this
and has no figures. Llama-2-70B has an eighth of the KV heads: its transfer hardly counts."""
LLAMA_NOTE = """\
The clusters that are best for BLOOM-176B, with Llama-2-70B and conversations: its own measurements,
KV cache and limits (the paper's Figure 20b, a plot without numbers in its text)."""
NOTES = """\
- *A second token per layer* rises by far less than in the paper, because our transfer has no cost
  of synchronization; with the paper's visible time the sign and the size agree.
- *Slips of the paper.* Table I has Gbit/s for NVLink where GB/s are meant. Table III names 32
  heads for Llama-2-70B, which has 64. Table IV has 0.70 as the ratio of coding's TBT, but 31 / 52
  is 0.60; its dollars are cents. Table V has 2.35 (prompt) and 2.5 (token) as the cost of a
  DGX-H100, Table I 2.16, which is 38 $ / 17.6 $; the searches take 2.16. Section VI-B says 35
  prompt machines for conversation, the legend 25.
- *HA at 1.18 x and 10 % less cost* is compared with Baseline-H100 here: Baseline-A100 costs less
  than HA does. With Table V's 2.35 the paper's HA costs 10 % less, with 2.16 it costs 7 % less.
- *Baseline-H100 serves more than in the paper*, and HA and AA serve less beside it. Proven: the
  limits are slowdowns against a DGX-A100, and an H100's decode step takes 36 ms of its 49 ms, which
  leaves a machine of both phases time for prompts. At the measured step times the paper's HA,
  25P/26T, serves 46 requests/s without queues, so that 1.18 x would be a Baseline-H100 of 39
  requests/s, which ours serves with a median TBT of 0.85. Not known: what slows the paper's down.
  Not the cause: with each gap between two tokens as a TBT its P99 is 3.5 at 60 requests/s (limit
  5). With code the paper's two designs, 55P/15T and 35P/5T, serve 102 and 103 requests/s without
  queues, as much as each other.
- *Not the steady state.* A decode of conversations takes 10 s and requests arrive for 30 s (the
  paper's traces last 2 minutes): token pools serve more than without queues for ever, and rates in
  two pools are too high rather than too low: AA serves 103.0 with 85 machines, and 89 are needed
  without queues. The clusters for the rate of Baseline-H100 keep that number: AA's 94 cost 9 % more
  than Baseline-H100, and HHcap takes 11 % less power.
- *Batch jobs*: prompts dominate code, and HH computes them more cheaply than AA here.
- *Prompts leave the prompt machine's cache at once*: full token machines do not hold up prompt
  machines here. The mixed pool, which lends machines to the other phase, has its own section."""
REFERENCE = 'Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677)'
SCALE = 5
"""Searches run on clusters of this share of the paper's machines: 8 DGX-H100 or 14 DGX-A100."""
BASELINE_POLICY = "splitwise"
"""Scheduling policy of machines that do both phases, as in splitwise-sim."""
QUICK_SECONDS = 0.5
"""Shortest time in which requests arrive, in a functional check."""
FULL_DESIGNS = ("Baseline-A100", "Baseline-H100", "AA", "HH", "HA")
"""Designs whose clusters are simulated at full size, too."""
LLAMA_DESIGNS = ("Baseline-A100", "Baseline-H100", "AA", "HH", "HA")
"""Designs whose best clusters for BLOOM-176B serve Llama-2-70B as well."""


@dataclass
class ClusterStudy:
    """Figures of all clusters."""

    size: SampleSize
    """Requests of a simulation."""
    outcomes: Outcomes
    full: list[FullRow]
    """Clusters for conversations at full size."""
    borders: list[BorderOutcome]
    batches: Batches
    mixed: list[tuple[MixedTask, float]]
    """Searches with and without the mixed pool, and their rates."""
    llama: dict[str, float]
    """Requests per second of Llama-2-70B by design."""
    throttled: list[tuple[ThrottleTask, float]]
    """Searches with local policies in pipelined engines, and their rates."""


def run(options: ExperimentOptions) -> ExperimentResult:
    """Search for clusters, and write them beside the tables of single machines."""
    return make_page(measure_clusters(options))


def measure_clusters(options: ExperimentOptions) -> ClusterStudy:
    """Return the figures of all clusters."""
    size = SampleSize(
        max(8, options.requests // 2), QUICK_SECONDS if options.quick else MIN_SECONDS
    )
    workloads = ["conversation"] if options.quick else list(WORKLOADS)
    outcomes = _search_all(options, workloads, size)
    return ClusterStudy(
        size,
        outcomes,
        _measure_full(options, outcomes, size),
        _search_borders(options, outcomes, size),
        _run_batches(options, outcomes, workloads, size),
        _search_mixed(options, outcomes, size),
        _measure_llama(options, outcomes),
        _search_throttled(options, outcomes, size),
    )


def make_page(study: ClusterStudy) -> ExperimentResult:
    """Return the page: single machines, then clusters."""
    tables, claims = [], []
    for table, each in (perf_model_table(), table_iv(), second_token_table()):
        tables.append(table)
        claims += each
    outcomes = study.outcomes
    mixed, mixed_claims = mixed_table(study.mixed, SCALE)
    claims += cluster_claims(outcomes, study.batches) + full_size_claims(study.full)
    claims += mixed_claims
    sections = {
        "Performance model": tables[0],
        "One request": f"{tables[1]}\n\n{TABLE_IV_NOTE}",
        "Second token": f"{tables[2]}\n\n{SECOND_NOTE}",
        "Next turn": f"{next_turn_table()}\n\n{NEXT_TURN_NOTE}",
        "Clusters under a budget": search_table(outcomes),
        "Clusters at full size": f"{FULL_NOTE}\n\n{full_size_table(study.full)}",
        "Clusters for the rate of Baseline-H100": border_table(study.borders, SCALE),
        "Batch jobs": batch_table(study.batches),
        "The mixed pool": f"{MIXED_NOTE}\n\n{mixed}",
        "Token throttling": f"{THROTTLE_NOTE}\n\n{throttle_table(study.throttled)}",
        "Llama-2-70B on clusters for BLOOM-176B": (
            f"{LLAMA_NOTE}\n\n{llama_table(outcomes, study.llama, SCALE)}"
        ),
        "Misses and slips": NOTES,
    }
    parts = [f"## {title}\n\n{text}" for title, text in sections.items()]
    return ExperimentResult(
        "Splitwise: machines and clusters in simulation",
        "\n\n".join([_setting(study), *parts]),
        claims,
        {"splitwise.svg": lambda path: plot_rates(outcomes, path)},
        reference=REFERENCE,
    )


def _setting(study: ClusterStudy) -> str:
    lengths = "; ".join(
        f"{name} {mean_workload_lengths(name)[0]:.0f} / {mean_workload_lengths(name)[1]:.0f}"
        for name in WORKLOADS
    )
    num_points = sum(outcome.num_designs for outcome in study.outcomes.values())
    num_full = sum(row.num_clusters for row in study.full)
    num_runs = sum(row.num_simulations for row in study.full)
    num_points += len(study.mixed) + len(study.llama) + len(study.throttled)
    return f"""Simulated. Costs: the whole steps of
[splitwise_perf_model.csv](../../gllm/sim/data/README.md), piecewise linear over the tokens of a
batch of prompts and over the requests of a decode batch; a batch of both takes 1.1 times its prompt
time. Prices, power and links: `splitwise_machines.csv` (Tables I and V). Clusters serve BLOOM-176B
at TP 8 with the lengths of Azure's 2023 traces (mean prompt / output tokens: {lengths}) and Poisson
arrivals. Requests join the shortest queue, by pending tokens, of the prompt pool or of a cluster
without pools, then the machine of the token pool with the fewest tokens; batches of prompts have at
most 2,560 tokens (Baseline: policy `splitwise`, both phases in one batch, at most 2,048 tokens, as
in splitwise-sim); a transfer hides behind the prompt but for a tenth. Every cluster but those of
"Clusters at full size" is **1/{SCALE} of the paper's size** ({40 // SCALE} H100 or {70 // SCALE}
A100): {num_points} points, each searched for its highest rate within the nine SLOs (in steps of
5 %). A simulation has {study.size.requests:,} requests, or as many as arrive in
{study.size.seconds:g} s. Rates are shown for the full size. "Clusters at full size" are {num_full}
points in {num_runs} simulations."""


def _search_all(options: ExperimentOptions, workloads: list[str], size: SampleSize) -> Outcomes:
    """Return the best clusters by constraint, workload and design."""
    designs = ("HH",) if options.quick else DESIGNS
    tasks = [
        SearchTask(design, workload, "power", SCALE, size, _policy(design))
        for workload in workloads
        for design in (*BASELINES, *designs)
    ]
    if not options.quick:
        tasks.append(SearchTask("AA", "conversation", "cost", SCALE, size, POLICY))
    found = map_parallel(search_design, tasks, options.jobs, options.progress, "search")
    return {
        (task.constraint, task.workload, task.design): outcome
        for task, outcome in zip(tasks, found, strict=True)
    }


def _policy(design: str) -> str:
    return BASELINE_POLICY if design in BASELINES else POLICY


def _measure_full(
    options: ExperimentOptions, outcomes: Outcomes, size: SampleSize
) -> list[FullRow]:
    """Return the clusters for conversations at full size."""
    if options.quick:
        return []
    chosen = [
        outcome
        for (_, workload, design), outcome in outcomes.items()
        if workload == "conversation" and design in FULL_DESIGNS and outcome.rate
    ]
    return measure_full_size(chosen, size, options.jobs, options.progress)


def _search_borders(
    options: ExperimentOptions, outcomes: Outcomes, size: SampleSize
) -> list[BorderOutcome]:
    """Return the cheapest clusters for code that serve the rate of Baseline-H100."""
    tasks: list[BorderTask] = []
    if not options.quick and (rate := outcomes["power", "code", "Baseline-H100"].rate):
        tasks = [BorderTask(design, "code", rate, size, POLICY) for design in DESIGNS]
    return map_parallel(search_border, tasks, options.jobs, options.progress, "border")


def _run_batches(
    options: ExperimentOptions, outcomes: Outcomes, workloads: list[str], size: SampleSize
) -> Batches:
    """Return the throughput of batch jobs by workload and cluster."""
    tasks = [
        BatchTask(name, outcome.cluster, workload, SampleSize(2 * size.requests), _policy(name))
        for (constraint, workload, name), outcome in outcomes.items()
        if constraint == "power" and name in (*BASELINES, "AA", "HH")
    ]
    rates = map_parallel(batch_rate, tasks, options.jobs, options.progress, "batch")
    return {
        (task.workload, task.name): (task, rate) for task, rate in zip(tasks, rates, strict=True)
    }


def _search_mixed(
    options: ExperimentOptions, outcomes: Outcomes, size: SampleSize
) -> list[tuple[MixedTask, float]]:
    """Return the rates of the homogeneous cluster for code with conversations."""
    if options.quick:
        return []
    base = outcomes["power", "conversation", "HH"]
    code = outcomes["power", "code", "HH"].cluster
    tasks = mixed_tasks(code, base.rate or fluid_rate(code, "conversation"), size)
    rates = map_parallel(mixed_rate, tasks, options.jobs, options.progress, "mixed")
    return list(zip(tasks, rates, strict=True))


def _search_throttled(
    options: ExperimentOptions, outcomes: Outcomes, size: SampleSize
) -> list[tuple[ThrottleTask, float]]:
    """Return the rates of the best homogeneous clusters with local policies in stages."""
    designs = (
        {}
        if options.quick
        else {workload: outcomes["power", workload, "HH"].cluster for workload in WORKLOADS}
    )
    tasks = throttle_tasks(designs, size)
    rates = map_parallel(throttle_rate, tasks, options.jobs, options.progress, "throttle")
    return list(zip(tasks, rates, strict=True))


def _measure_llama(options: ExperimentOptions, outcomes: Outcomes) -> dict[str, float]:
    """Return the rates of Llama-2-70B on the clusters for BLOOM-176B by design."""
    chosen = [] if options.quick else [outcomes["power", "conversation", n] for n in LLAMA_DESIGNS]
    rates = map_parallel(llama_rate, chosen, options.jobs, options.progress, "llama")
    return dict(zip(LLAMA_DESIGNS, rates, strict=False))
