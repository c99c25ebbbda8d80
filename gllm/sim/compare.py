"""A real run beside its prediction.

Owns what is compared: the same requests at the same times under the same configuration, the stages'
times from a profile of another run. Knows nothing of how either was made.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from gllm.metrics import percentile
from gllm.scheduler.sequence import Request
from gllm.sim.costs.fitted import FittedCost
from gllm.sim.deployment import Deployment, serve_requests
from gllm.sim.profile import Profile, read_profile
from gllm.sim.report import show, text_table
from gllm.sim.run import Run, run_of
from gllm.step_log import Abort, Add, Event, read_step_log

METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Comparison:
    """The two runs, of the same requests."""

    real: Run
    predicted: Run


def compare(log: str | Path, profile: str | Path) -> Comparison:
    """Predict the run of a step log from a profile's file. Raises ValueError and OSError as the
    files' readers do, and as `compare_runs`."""
    return compare_runs(list(read_step_log(log)), read_profile(profile))


def compare_runs(events: list[Event], profile: Profile) -> Comparison:
    """Predict a run. Raises ValueError where the profile is of another pipeline."""
    real = run_of(events)
    if profile.layers != real.start.layers:
        raise ValueError(
            f"the run had stages of {real.start.layers} layers, the profile of {profile.layers}: "
            "measure the profile at the same --pp"
        )
    start = real.start
    deployment = Deployment(start.model, start.layers, FittedCost(profile), start.scheduler)
    predicted, _ = serve_requests(deployment, requests_of_log(events, real))
    return Comparison(real, predicted)


def requests_of_log(events: list[Event], run: Run) -> list[tuple[float, Request]]:
    """A log's requests, each to generate as many tokens as it did there; warm-ups are left out."""
    requests = []
    for event in events:
        if isinstance(event, Add) and event.seq in run.requests:
            seqs = range(event.seq, event.seq + event.n)
            tokens = max(1, *(run.requests[seq].line.tokens for seq in seqs))
            request = Request(
                *(event.seq, event.prompt, tokens, frozenset(), event.priority),
                *(event.cache_salt, event.n),
            )
            requests.append((event.time, request))
    return requests


def aborts_of_log(events: list[Event]) -> list[tuple[float, list[int]]]:
    """A log's aborts and their times."""
    return [(event.time, event.seqs) for event in events if isinstance(event, Abort)]


def _values(run: Run, metric: str) -> dict[int, float]:
    found = ((seq, getattr(served.line, metric)) for seq, served in run.requests.items())
    return {seq: value for seq, value in found if value is not None}


def median_error(comparison: Comparison, metric: str) -> float:
    """Median over the requests of |predicted - real| / real."""
    real, predicted = _values(comparison.real, metric), _values(comparison.predicted, metric)
    return median(
        abs(predicted[seq] - value) / value
        for seq, value in real.items()
        if value and seq in predicted
    )


def median_of(run: Run, metric: str) -> float:
    """Median over the requests, seconds."""
    return median(_values(run, metric).values())


def error_of_median(comparison: Comparison, metric: str) -> float:
    """How far the predicted median is from the real one, as a share of it; with sign."""
    return median_of(comparison.predicted, metric) / median_of(comparison.real, metric) - 1


def slowdown(comparison: Comparison) -> float:
    """Seconds that the real stages computed over what was predicted for the same tokens: how much
    slower the machine was in the run than in the profile, as far as the cost model is right."""
    seconds = []
    for run in (comparison.real, comparison.predicted):
        uses = run.stage_uses()
        tokens = sum(step.work.tokens for step in run.steps)
        seconds.append(sum(use.busy for use in uses) / (tokens or 1))
    return seconds[0] / seconds[1]


def comparison_table(comparison: Comparison) -> str:
    """Real, predicted and their relation, for each latency; bubbles and busy shares below."""
    rows = []
    for metric in METRICS:
        real = list(_values(comparison.real, metric).values())
        predicted = list(_values(comparison.predicted, metric).values())
        pairs = {
            "mean": (fmean(real), fmean(predicted)),
            **{f"p{p}": (percentile(real, p), percentile(predicted, p)) for p in (50, 90, 99)},
        }
        for name, (was, said) in pairs.items():
            label = f"{metric.upper()} {name}, ms"
            rows.append([label, show(was, 1e3), show(said, 1e3), f"{said / was - 1:+.1%}"])
        error = median_error(comparison, metric)
        rows.append([f"{metric.upper()} median error of a request", "", "", f"{error:.1%}"])
    uses = comparison.real.stage_uses(), comparison.predicted.stage_uses()
    for label, name in (("stages busy, %", "busy_share"), ("bubbles, %", "bubble_share")):
        shares = [show([getattr(use, name) for use in stages], 100) for stages in uses]
        rows.append([label, *shares, ""])
    counts = len(comparison.real.steps), len(comparison.predicted.steps)
    rows.append(["micro-batches", *map(str, counts), f"{counts[1] / counts[0] - 1:+.1%}"])
    return text_table(["", "real", "predicted", "error"], rows)
