"""Eviction of the prefix cache with agents that pause: LRU, learned return times, hindsight."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from experiments.base import OWN_REFERENCE, ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedDirection, ExpectedLimit, PaperClaim
from experiments.parallel import map_parallel
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.eviction import EVICTION_NAMES
from gllm.sim.deployment import Deployment, roofline_deployment, simulate_sessions
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table
from gllm.sim.metrics.session_turns import summarize_turns
from gllm.sim.workloads.agents import parse_agents
from gllm.sim.workloads.requests import (
    WorkloadRequest,
    longest_job,
    make_agents,
    make_workload,
)

MODEL, DEVICE, STAGES = "qwen2.5-7b", "L20", 4
AGENTS = "agents:40,10,1000,1000,800,150"
RATE = 1.0
"""Agents that begin per second."""
CACHE_SHARE = 1 / 3
"""KV cache, as a share of the working set."""
SEEDS = tuple(range(5))
MAX_RATIO = 1.02
"""Recomputed tokens of `return` divided by those of `lru` that no seed should exceed."""
HINDSIGHT = "hindsight"
ORDERS = (*EVICTION_NAMES, HINDSIGHT)


Figures = dict[tuple[str, str], list[dict[str, Any]]]
"""Figures of `summarize_turns` for each seed, by case and order of eviction."""


class Case(NamedTuple):
    """Pauses of the agents, and other requests beside them."""

    name: str
    pauses: str
    single_rate: float = 0.0
    """Requests per second of 2,000 to 6,000 prompt tokens that never return."""
    cache_share: float = CACHE_SHARE


CASES = (
    Case("tools of 30 s", "fixed:30"),
    Case("tools of 20 to 40 s", "uniform:20,40"),
    Case("tools, mostly short", "lognormal:8,30"),
    Case("tools of 10 s, people", "fixed:10/exponential:120"),
    Case("one tool in four is slow", "fixed:5|fixed:5|fixed:5|exponential:120"),
    Case("no memory", "exponential:30"),
    Case("tools of 30 s beside single requests", "fixed:30", 1.0),
    Case("tools of 30 s, cache for all", "fixed:30", 0.0, 1.05),
)


@dataclass(frozen=True)
class SessionTrial:
    """One simulation."""

    case: Case
    order: str
    seed: int


def make_jobs(case: Case, seed: int) -> list[WorkloadRequest]:
    """Return the requests of a case: those of the agents, and single requests meanwhile."""
    jobs = make_agents(AGENTS, RATE, seed=seed, pauses=case.pauses)
    if case.single_rate:
        num_agents, num_turns, *_ = parse_agents(AGENTS)
        pauses = [job.pause_seconds for job in jobs if job.pause_seconds is not None]
        seconds = num_agents / RATE + num_turns * fmean(pauses)
        count = round(case.single_rate * seconds)
        jobs += make_workload("uniform:2000,6000,50,250", count, case.single_rate, seed=seed)
    return sorted(jobs, key=lambda job: job.arrival_seconds)


def working_set_tokens(jobs: list[WorkloadRequest]) -> int:
    """Return the tokens of the agents' last prompts and answers; the system prompt counts once."""
    last = {job.session: job for job in jobs if job.session}
    shared = next(iter(last.values())).parts[0].num_tokens
    own = (job.num_prompt_tokens + job.num_output_tokens - shared for job in last.values())
    return shared + sum(own)


def make_deployment(case: Case, jobs: list[WorkloadRequest], order: str) -> Deployment:
    """Return the engine, with the cache of the case."""
    eviction = EVICTION_NAMES[0] if order == HINDSIGHT else order
    config = SchedulerConfig(prefix_cache_eviction=eviction)
    deployment = roofline_deployment(MODEL, DEVICE, STAGES, longest_job(jobs), scheduler=config)
    num_blocks = round(case.cache_share * working_set_tokens(jobs) / config.block_size)
    return replace(deployment, scheduler=replace(deployment.scheduler, num_blocks=num_blocks))


def run_trial(trial: SessionTrial) -> dict[str, Any]:
    """Simulate a trial; return the figures of its conversations."""
    jobs = make_jobs(trial.case, trial.seed)
    deployment = make_deployment(trial.case, jobs, trial.order)
    is_optimum = trial.order == HINDSIGHT
    run = simulate_sessions(deployment, jobs, has_hindsight=is_optimum)
    times = [served.line.times[-1] for served in run.record.requests.values()]
    return summarize_turns(run.turns) | {"seconds": max(times)}


def run(options: ExperimentOptions) -> ExperimentResult:
    """Compare the orders of eviction in all cases."""
    cases, seeds = (CASES[:1], SEEDS[:1]) if options.quick else (CASES, SEEDS)
    trials = [
        SessionTrial(case, order, seed) for case in cases for order in ORDERS for seed in seeds
    ]
    results = map_parallel(run_trial, trials, options.jobs, options.progress, "simulation")
    figures: Figures = {}
    for trial, result in zip(trials, results, strict=True):
        figures.setdefault((trial.case.name, trial.order), []).append(result)
    jobs = make_jobs(CASES[0], 0)
    return ExperimentResult(
        "Agents that return: eviction of the prefix cache by value",
        _text(cases, figures, working_set_tokens(jobs)),
        _claims(figures),
        {"sessions.svg": partial(_plot, cases, figures)},
        OWN_REFERENCE,
    )


def _mean(results: list[dict[str, Any]], *path: str) -> float:
    values = []
    for result in results:
        value: Any = result
        for name in path:
            value = value[name]
        values.append(float(value))
    return fmean(values)


def _recomputed(figures: Figures, case: str, order: str) -> float:
    return _mean(figures[case, order], "recomputed_tokens")


def _ratios(figures: Figures, case: str, order: str) -> list[float]:
    """Return the recomputed tokens of an order divided by those of LRU, for each seed."""
    pairs = zip(figures[case, order], figures[case, "lru"], strict=True)
    return [own["recomputed_tokens"] / max(1, lru["recomputed_tokens"]) for own, lru in pairs]


def _text(
    cases: tuple[Case, ...],
    figures: Figures,
    num_tokens: int,
) -> str:
    header = ["case", "pauses", "order", "recomputed", "of `lru`", "seeds"]
    header += ["hit share", "TTFT p50, s", "p99, s", "run, s"]
    rows = []
    for case in cases:
        for order in ORDERS:
            results = figures[case.name, order]
            ratios = _ratios(figures, case.name, order)
            rows.append(
                [
                    case.name if order == ORDERS[0] else "",
                    f"`{case.pauses}`".replace("|", "\\|") if order == ORDERS[0] else "",
                    f"`{order}`",
                    f"{_recomputed(figures, case.name, order):,.0f}",
                    f"{100 * fmean(ratios):.0f} %",
                    f"{100 * min(ratios):.0f} to {100 * max(ratios):.0f}",
                    f"{100 * _mean(results, 'hit_share'):.1f} %",
                    f"{_mean(results, 'later_ttft', 'p50'):.2f}",
                    f"{_mean(results, 'later_ttft', 'p99'):.2f}",
                    f"{_mean(results, 'seconds'):.0f}",
                ]
            )
    reusable = _mean(figures[cases[0].name, "lru"], "reusable_tokens")
    num_agents, num_turns, system, task, result, output = parse_agents(AGENTS)
    return f"""
{num_agents} agents with {num_turns} turns each on a simulated {MODEL} over {STAGES} x {DEVICE}: a
system prompt of {system} tokens that all share, a task of {task} tokens on average, then results of
tools of {result} and answers of {output}. A turn begins a pause after the end of the one before,
with all earlier messages and answers as its prompt. The KV cache holds a third of the working set
of {num_tokens:,} tokens (the last contexts of all agents), unless the case says otherwise. Single
requests have prompts of 2,000 to 6,000 tokens, come at 1/s and never return.

*Recomputed*: tokens of the turn before (prompt and answer) that a later turn had to compute again;
all later turns together could have reused {reusable:,.0f}. Up to a block of 16 tokens per turn is
never in the cache. *Of `lru`* divides by what LRU recomputed with the same seed; *seeds* are the
least and the most of {len(figures[cases[0].name, "lru"])} seeds, all other figures their means.
TTFT is that of later turns.

- `lru` evicts what was used longest ago.
- `return` evicts what is worth least: blocks of the conversation with the lowest rate of returns,
  learned while it runs; where the observations show no difference, what was used longest ago
  ([scheduler.md](../../docs/scheduler.md#eviction)).
- `hindsight` knows when each conversation returns and evicts the block whose next use is farthest
  (Belady). It would be optimal for requests one at a time in a fixed order and blocks of equal
  cost. Here evictions change when later turns arrive, so it is a yardstick and no bound.

{format_table(header, rows)}
"""


def _claims(figures: Figures) -> list[PaperClaim]:
    claims = []
    for name in ("tools of 30 s", "tools of 30 s beside single requests"):
        if (name, "lru") in figures:
            ratio = _recomputed(figures, name, "return") / _recomputed(figures, name, "lru")
            claims.append(
                PaperClaim(
                    f"tokens recomputed, {name}", ExpectedDirection(False, "fewer"), ratio - 1
                )
            )
    names = {name for name, _ in figures}
    worst = max(ratio for name in names for ratio in _ratios(figures, name, "return"))
    aim = ExpectedLimit(MAX_RATIO, name="at most")
    claims.append(PaperClaim("tokens recomputed of LRU's, worst seed of all cases", aim, worst))
    return claims


def _plot(cases: tuple[Case, ...], figures: Figures, path: Path) -> None:
    groups = {
        case.name: {order: _recomputed(figures, case.name, order) / 1000 for order in ORDERS}
        for case in cases
    }
    plot_bars(groups, path, "thousand tokens", "Tokens recomputed by later turns")
