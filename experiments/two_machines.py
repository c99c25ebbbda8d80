"""Two machines as one pipeline over a link of 25 Gbit/s, against one machine: what is lost where.

Simulated, and served by engines on emulated devices, with all requests there at once; also on two
nodes that gllm-link joins.
"""

from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.emulated import (
    comparison_table,
    describe_hardware,
    fidelity_claims,
    name_misses,
)
from experiments.emulated_trials import GroupServer, ServedTrial, serve_trials
from experiments.emulation import make_ideal, step_seconds
from experiments.parallel import map_parallel
from experiments.trials import (
    JUDGED_POLICIES,
    PAPER_POLICY,
    SimulationTrial,
    TrialRun,
    deploy_trial,
    measure_capacity,
    simulate_trial,
    trial_jobs,
)
from experiments.two_nodes import (
    LINK,
    MAX_NUM_SEQS,
    MIN_GAIN,
    ONE,
    REQUESTS,
    TWO,
    WORKLOAD,
    NodeServer,
    serve_on_nodes,
)
from gllm.sim.deployment import simulate
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.metrics.run_record import RunRecord

BORDER = 1
"""Stage whose activations cross the link between the machines."""


class Pair(NamedTuple):
    """Runs of the same requests on one machine and on two."""

    one: TrialRun
    two: TrialRun

    @property
    def gain(self) -> float:
        """Tokens per second of two machines over those of one."""
        return read_speed(self.two) / read_speed(self.one)


def run(
    options: ExperimentOptions,
    serve: GroupServer | None = None,
    serve_nodes: NodeServer = serve_on_nodes,
) -> ExperimentResult:
    """Simulate and serve the same requests on one machine and on two.

    Args:
        options: Of the experiment.
        serve: Runs the engines; None for those of this machine.
        serve_nodes: Runs the engine on two nodes.
    """
    policies = JUDGED_POLICIES[:1] if options.quick else JUDGED_POLICIES
    count = 8 if options.quick else REQUESTS
    trials = [
        SimulationTrial(
            setting,
            WORKLOAD,
            policy,
            1.0,
            count,
            "static",
            options=(("max_num_seqs", MAX_NUM_SEQS),),
        )
        for setting in (ONE, TWO)
        for policy in policies
    ]
    records = map_parallel(simulate_trial, trials, options.jobs, options.progress)
    simulated = [TrialRun(*pair) for pair in zip(trials, records, strict=True)]
    nodes_trial = replace(trials[len(policies)], setting=replace(TWO, link="pcie"))
    nodes_run = TrialRun(nodes_trial, serve_nodes(nodes_trial, LINK).record)
    served = serve_trials(trials, 1.0, options.progress, serve, simulated)
    emulated = [each.run for each in served]
    claims = [
        PaperClaim(
            f"{of_one.trial.policy}: tokens/s of two machines over one",
            ExpectedLimit(MIN_GAIN, is_minimum=True, unit="x", digits=2),
            Pair(of_one, of_two).gain,
            f"(simulated {Pair(*expected).gain:.2f} x)",
        )
        for (of_one, of_two), expected in zip(_pairs(emulated), _pairs(simulated), strict=True)
    ]
    on_nodes = Pair(emulated[0], nodes_run)
    claims.append(
        PaperClaim(
            f"{policies[0]}: tokens/s of two nodes, joined by gllm-link, over one machine",
            ExpectedLimit(MIN_GAIN, is_minimum=True, unit="x", digits=2),
            on_nodes.gain,
        )
    )
    claims += _capacity_claims(trials, options)
    claims += fidelity_claims(simulated, served)
    text = (
        f"{count} requests of {WORKLOAD}, all there at once. One machine: {ONE}; two machines: "
        f"{TWO}, with a link of 25 Gbit/s and 0.05 ms between the machines, PCIe within. Tokens "
        "per second are those of the first 80 % of all tokens; while the last requests drain, "
        "batches are small, and more stages gain little. Cells: simulated / emulated. Two nodes: "
        "processes of their own in two network namespaces, whose activations travel through "
        "gllm-link over a shaped link. "
        f"{describe_hardware(trials)}\n\n"
        + comparison_table(simulated, served, options)
        + "\n\nWhat is lost, part by part; the first rows are simulated.\n\n"
        + format_table(
            [
                "policy",
                "with",
                "tokens/s, one",
                "two",
                "gain",
                "bubbles of one, %",
                "of two, %",
            ],
            [
                row
                for before, after in zip(_pairs(simulated), _pairs(emulated), strict=True)
                for row in _losses(Pair(*before), Pair(*after), on_nodes)
            ],
        )
        + "\n\nThe link between the machines, the way of the results to the driver, and the whole "
        "run to its end:\n\n" + _link_table(simulated, served) + name_misses(claims)
    )
    return ExperimentResult(
        "Two machines as one pipeline",
        text,
        claims,
        reference="none; the limits are this project's. The best published gain of a pipeline over "
        "two machines that is known here is 1.13 x",
    )


def read_speed(run: TrialRun) -> float:
    """Return the steady tokens per second of a run."""
    return float(run.figures["steady_tokens_per_second"])


def _pairs(runs: list[TrialRun]) -> list[tuple[TrialRun, TrialRun]]:
    """Return the runs on one and on two machines of each policy."""
    half = len(runs) // 2
    return list(zip(runs[:half], runs[half:], strict=True))


def _capacity_claims(trials: list[SimulationTrial], options: ExperimentOptions) -> list[PaperClaim]:
    """Return the gain in the rate that the simulator sustains, which has no begin and no end."""
    if options.quick:
        return []
    chosen = [
        replace(trial, arrivals="poisson") for trial in trials if trial.policy == PAPER_POLICY
    ]
    one, two = map_parallel(measure_capacity, chosen, options.jobs, options.progress, "capacity")
    return [
        PaperClaim(
            f"{PAPER_POLICY}: rate that the simulator sustains, two machines over one",
            ExpectedLimit(MIN_GAIN, is_minimum=True, unit="x", digits=2),
            two / one,
            f"({show_value(one)}/s to {show_value(two)}/s)",
        )
    ]


def _simulate_without_driver(trial: SimulationTrial) -> TrialRun:
    """Simulate a trial whose driver takes no time."""
    return TrialRun(trial, simulate(make_ideal(deploy_trial(trial)), trial_jobs(trial)))


def _losses(simulated: Pair, emulated: Pair, on_nodes: Pair) -> list[list[str]]:
    """Return a table row for each part that takes time, added one after another."""
    one, two = simulated.one.trial, simulated.two.trial
    without_link = replace(two, setting=replace(TWO, link="pcie"))
    one_without_driver = _simulate_without_driver(one)
    parts = {
        "PCIe everywhere, a driver without cost": Pair(
            one_without_driver, _simulate_without_driver(without_link)
        ),
        "the link of 25 Gbit/s": Pair(one_without_driver, _simulate_without_driver(two)),
        "the driver's predicted time": simulated,
        "the runtime (emulated)": emulated,
    }
    if on_nodes.two.trial.policy == one.policy:
        parts["two nodes and gllm-link (emulated)"] = on_nodes
    return [
        [
            one.policy,
            name,
            *(show_value(read_speed(run)) for run in pair),
            f"{pair.gain:.2f} x",
            *(show_value(100 * fmean(run.figures["bubble_share"])) for run in pair),
        ]
        for name, pair in parts.items()
    ]


def _link_table(simulated: list[TrialRun], served: list[ServedTrial]) -> str:
    """Return what the link and the driver take per micro-batch, and the gain of whole runs."""
    rows = []
    emulated = [each.run for each in served]
    for expected, measured in zip(_pairs(simulated), _pairs(emulated), strict=True):
        two = measured[1]
        cost = deploy_trial(two.trial).cost
        steps = two.record.micro_batches
        transfers = [cost.activation_transfer(BORDER, step.work) for step in steps]
        busy = sum(transfer.occupancy_seconds for transfer in transfers)
        span = two.record.end_time() - two.record.begin_time()
        returns = [_return_seconds(run.record) for run in (expected[1], two)]
        whole = [
            pair[1].figures["requests_per_second"] / pair[0].figures["requests_per_second"]
            for pair in (expected, measured)
        ]
        rows.append(
            [
                two.trial.policy,
                str(len(steps)),
                show_value(step_seconds(two.record), 1e3),
                show_value(fmean(t.num_bytes for t in transfers) / 1e6),
                show_value(busy / len(transfers), 1e3),
                show_value(100 * busy / span),
                " / ".join(show_value(each, 1e3) for each in returns),
                " / ".join(f"{each:.2f} x" for each in whole),
            ]
        )
    header = ["policy", "micro-batches", "ms of a step", "MB over the link", "ms of the link"]
    header += ["link busy, %", "ms to the driver", "gain of whole runs"]
    return format_table(header, rows)


def _return_seconds(record: RunRecord) -> float:
    """Return the mean time from the last stage's end of a step until its commit."""
    pairs = ((step.committed_time, step.stage_times[-1]) for step in record.micro_batches)
    return fmean(
        committed - last.end for committed, last in pairs if committed is not None and last
    )
