"""Splitwise in simulation: single machines, and the clusters that its search finds."""

from gllm.experiments.base import ExperimentOptions, ExperimentResult
from gllm.experiments.parallel import map_parallel
from gllm.experiments.splitwise_clusters import WORKLOADS, mean_lengths
from gllm.experiments.splitwise_designs import (
    BASELINES,
    DESIGNS,
    BatchTask,
    BorderOutcome,
    BorderTask,
    SearchTask,
    batch_rate,
    measure_full,
    search_border,
    search_design,
)
from gllm.experiments.splitwise_phases import perf_model_table, second_token_table, table_iv
from gllm.experiments.splitwise_tables import (
    Batches,
    Outcomes,
    batch_table,
    border_table,
    cluster_claims,
    plot_rates,
    search_table,
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
NOTES = """\
- *A second token per layer* rises by far less than in the paper, because our transfer has no cost
  of synchronization; with the paper's visible time the sign and the size agree.
- *Slips of the paper.* Table I has Gbit/s for NVLink where GB/s are meant. Table III names 32
  heads for Llama-2-70B, which has 64. Table IV has 0.70 as the ratio of coding's TBT, but 31 / 52
  is 0.60; its dollars are cents. Table V has 2.35 (prompt) and 2.5 (token) as the cost of a
  DGX-H100, Table I 2.16, which is 38 $ / 17.6 $; the searches take 2.16. Section VI-B says 35
  prompt machines for conversation, the legend 25.
- *HA at 1.18 x and 10 % less cost* is compared with Baseline-H100 here: Baseline-A100 costs less
  than HA does. With Table V's 2.35 HA costs 10 % less, with 2.16 it costs 7 % less.
- *The baselines' rates are uncertain*: with the nine SLOs' tails over 150 requests, 73.2 requests/s
  of Baseline-H100 in conversation were 54.6 at full size. So changes beside them miss the size.
- *Batch jobs* of code: prompts dominate, and HH computes them more cheaply than AA here.
- *Prompts leave the prompt machine's cache at once*: full token machines do not hold up prompt
  machines here. The mixed pool, which lends machines to the other phase, is not simulated."""
REFERENCE = 'Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677)'
SCALE = 5
"""Searches run on clusters of this share of the paper's machines: 8 DGX-H100 or 14 DGX-A100."""
POLICY = "vllm"
"""Scheduling policy of prompt and token machines: prompts first, in the order of arrival."""
BASELINE_POLICY = "sarathi"
"""Scheduling policy of machines that do both phases in one batch."""


def run(options: ExperimentOptions) -> ExperimentResult:
    """Compute the tables of single machines, then search for clusters."""
    requests = max(8, options.requests // 2)
    workloads = ["conversation"] if options.quick else list(WORKLOADS)
    tables, claims = [], []
    for table, each in (perf_model_table(), table_iv(), second_token_table()):
        tables.append(table)
        claims += each
    outcomes = _search_all(options, workloads, requests)
    full = _measure_full(options, outcomes)
    borders = _search_borders(options, outcomes, workloads, requests)
    batches = _run_batches(options, outcomes, workloads, requests)
    claims += cluster_claims(outcomes, borders, batches)
    text = (
        _setting(requests, outcomes)
        + f"\n\n## Performance model\n\n{tables[0]}\n\n## One request\n\n{tables[1]}\n\n"
        + f"{TABLE_IV_NOTE}\n\n## Second token\n\n{tables[2]}\n\n{SECOND_NOTE}\n\n"
        + f"## Clusters under a budget\n\n{search_table(outcomes, full)}\n\n"
        + f"## Clusters for the rate of Baseline-H100\n\n{border_table(borders, SCALE)}\n\n"
        + f"## Batch jobs\n\n{batch_table(batches)}\n\n"
        + f"## Misses and slips\n\n{NOTES}"
    )
    return ExperimentResult(
        "Splitwise: machines and clusters in simulation",
        text,
        claims,
        {"splitwise.svg": lambda path: plot_rates(outcomes, path)},
        reference=REFERENCE,
    )


def _setting(requests: int, outcomes: Outcomes) -> str:
    lengths = "; ".join(
        f"{name} {mean_lengths(name)[0]:.0f} / {mean_lengths(name)[1]:.0f}" for name in WORKLOADS
    )
    num_points = sum(outcome.num_designs for outcome in outcomes.values())
    return f"""Simulated. Costs: the whole steps of
[splitwise_perf_model.csv](../../gllm/sim/data/README.md), piecewise linear over the tokens of a
batch of prompts and over the requests of a decode batch; a batch of both takes 1.1 times its prompt
time. Prices, power and links: `splitwise_machines.csv` (Tables I and V). Clusters serve BLOOM-176B
at TP 8 with the lengths of Azure's 2023 traces (mean prompt / output tokens: {lengths}) and Poisson
arrivals. Requests join the shortest queue of the prompt pool, then of the token pool; batches of
prompts have at most 2,560 tokens (Baseline: prompts and decodes in one batch, at most 2,560
tokens); a transfer hides behind the prompt but for a tenth.
Every cluster is **1/{SCALE} of the paper's size** ({40 // SCALE} H100 or {70 // SCALE} A100):
{num_points} points under a budget, each searched for its highest rate within the nine SLOs (in
steps of 5 %) with {requests:,} requests per simulation. Rates are shown for the full size."""


def _search_all(options: ExperimentOptions, workloads: list[str], requests: int) -> Outcomes:
    """Return the best clusters by constraint, workload and design."""
    designs = ("HH",) if options.quick else DESIGNS
    tasks = [
        SearchTask(design, workload, "power", SCALE, requests, _policy(design))
        for workload in workloads
        for design in (*BASELINES, *designs)
    ]
    if not options.quick:
        tasks += [
            SearchTask("AA", workload, "cost", SCALE, requests, POLICY) for workload in workloads
        ]
    found = map_parallel(search_design, tasks, options.jobs, options.progress, "search")
    return {
        (task.constraint, task.workload, task.design): outcome
        for task, outcome in zip(tasks, found, strict=True)
    }


def _policy(design: str) -> str:
    return BASELINE_POLICY if design in BASELINES else POLICY


def _measure_full(options: ExperimentOptions, outcomes: Outcomes) -> dict[str, float]:
    """Return the rates of the best clusters in the paper's size, by workload and design."""
    chosen = [
        (key, outcome)
        for key, outcome in outcomes.items()
        if key[0] == "power" and key[2] in ("HH", "Baseline-H100") and outcome.rate
    ]
    if options.quick:
        chosen = []
    measured = map_parallel(
        measure_full, [outcome for _, outcome in chosen], options.jobs, options.progress, "full"
    )
    return {
        f"{key[1]} {key[2]}": rate for (key, _), (_, rate, _) in zip(chosen, measured, strict=True)
    }


def _search_borders(
    options: ExperimentOptions, outcomes: Outcomes, workloads: list[str], requests: int
) -> list[BorderOutcome]:
    """Return the cheapest clusters that serve the rate of Baseline-H100."""
    tasks: list[BorderTask] = []
    for workload in workloads[: 0 if options.quick else None]:
        rate = outcomes["power", workload, "Baseline-H100"].rate
        if rate:
            tasks += [BorderTask(design, workload, rate, requests, POLICY) for design in DESIGNS]
    return map_parallel(search_border, tasks, options.jobs, options.progress, "border")


def _run_batches(
    options: ExperimentOptions, outcomes: Outcomes, workloads: list[str], requests: int
) -> Batches:
    """Return the throughput of batch jobs by workload and cluster."""
    tasks = [
        BatchTask(name, outcome.cluster, workload, 2 * requests, _policy(name))
        for (constraint, workload, name), outcome in outcomes.items()
        if constraint == "power" and name in (*BASELINES, "AA", "HH")
    ]
    rates = map_parallel(batch_rate, tasks, options.jobs, options.progress, "batch")
    return {
        (task.workload, task.name): (task, rate) for task, rate in zip(tasks, rates, strict=True)
    }
