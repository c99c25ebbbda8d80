"""Speculation over pipelines: windows in flight against one window and against none.

Guesses are right at a given rate, as those of a multi-token-prediction head; their own cost is not
counted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from experiments.base import OWN_REFERENCE, ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from experiments.parallel import map_parallel
from experiments.trials import (
    L20_32B,
    HardwareSetting,
    SimulationTrial,
    TrialRun,
    describe_speculation,
    simulate_trial,
)
from gllm.scheduler.speculative_config import SpeculativeConfig
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table, show_value

POLICY = "throttle"
WORKLOAD = "fixed:256,160"
DELAYS = (0, 10, 30, 100)
"""One-way delays of a weak link in milliseconds."""
WEAK_LINKS = tuple(
    HardwareSetting("qwen2.5-7b", "L20", 3, f"0.1gbit+{delay}ms") for delay in DELAYS
)
ACCEPTANCES = (0.7, 0.8, 0.9)
GUESSES = (1, 2, 4)
"""Guesses of a window."""
SIMULATED_REQUESTS = 8
"""Of each stream."""
EXPLANATION = (
    f"Streams send requests of {WORKLOAD.partition(':')[2].replace(',', ' and ')} tokens of prompt "
    "and output, one after the other, without speculation, with one window of each sequence, and "
    "with any number in flight. A guess whose predecessors are right is right at the given rate. "
    "Making guesses costs nothing here, as with n-grams; a draft model would take time. The limit: "
    "a stream has 1 / (1 - right) tokens from one wrong guess to the next, each of which costs the "
    "time of a token to pass all stages and links."
)


class Aim(NamedTuple):
    """Least gain of windows in flight."""

    setting: HardwareSetting
    streams: int
    least_gain: float
    beats_one: bool = False
    """Over one window instead of none."""


AIMS = (
    Aim(L20_32B, 1, 2.5, True),
    Aim(L20_32B, 32, 1.3),
    *(Aim(setting, 1, 3.0) for setting in WEAK_LINKS if setting.link.endswith("+30ms")),
)


def emulated_trials(options: ExperimentOptions) -> list[SimulationTrial]:
    """Return the trials for emulated devices: those of the settings that have an aim."""
    return make_trials([(aim.setting, aim.streams) for aim in AIMS], options)


def make_trials(
    cases: Sequence[tuple[HardwareSetting, int]], options: ExperimentOptions
) -> list[SimulationTrial]:
    """Return the trials: without guesses, with one window, and with any number in flight.

    Args:
        cases: Settings and numbers of streams.
        options: `requests` is that of each stream.
    """
    configs = [
        SpeculativeConfig(
            num_guesses,
            "synthetic",
            max_windows_in_flight=windows,
            synthetic_acceptance_rate=acceptance,
        )
        for acceptance in ACCEPTANCES[-1 if options.quick else 0 :]
        for num_guesses in GUESSES[: 1 if options.quick else None]
        for windows in (1, None)
    ]
    return [
        make_trial(setting, streams, config, options.requests)
        for setting, streams in cases[: 1 if options.quick else None]
        for config in (None, *configs)
    ]


def make_trial(
    setting: HardwareSetting, streams: int, config: SpeculativeConfig | None, requests: int
) -> SimulationTrial:
    """Return the trial of a number of streams, each with a number of requests."""
    options: tuple[tuple[str, Any], ...] = (("max_num_seqs", streams),)
    if config is not None:
        options += (("speculative_config", config),)
    return SimulationTrial(
        setting, WORKLOAD, POLICY, 1.0, requests * streams, "static", options=options
    )


class Gain(NamedTuple):
    """Output tokens per second of a trial with windows in flight, and of those it is beside."""

    trial: SimulationTrial
    without: float
    one_window: float
    in_flight: float

    @property
    def streams(self) -> int:
        """Number of streams."""
        return int(dict(self.trial.options)["max_num_seqs"])

    @property
    def config(self) -> SpeculativeConfig:
        """Guesses and their acceptance."""
        return read_config(self.trial)


def compare(runs: Sequence[TrialRun]) -> list[Gain]:
    """Return the gains of all trials with windows in flight."""
    speeds = {run.trial: float(run.figures["output_tokens_per_second"]) for run in runs}
    gains = []
    for trial, in_flight in speeds.items():
        options = dict(trial.options)
        config = options.pop("speculative_config", None)
        if config is None or config.max_windows_in_flight is not None:
            continue
        limited = options | {"speculative_config": replace(config, max_windows_in_flight=1)}
        without, one_window = (
            speeds[replace(trial, options=tuple(each.items()))] for each in (options, limited)
        )
        gains.append(Gain(trial, without, one_window, in_flight))
    return gains


def emulated_claims(runs: list[TrialRun], policy: str) -> list[PaperClaim]:
    """Return what windows in flight gain, from the runs of `emulated_trials`.

    Args:
        runs: Of the trials.
        policy: That of the trials.
    """
    assert policy == POLICY
    claims = []
    for gain in compare(runs):
        for aim in AIMS:
            if (aim.setting, aim.streams) != (gain.trial.setting, gain.streams):
                continue
            base, name = (gain.one_window, "one") if aim.beats_one else (gain.without, "none")
            claims.append(
                PaperClaim(
                    f"{aim.setting}, {describe_speculation(gain.config)}, streams: {aim.streams}; "
                    f"output tokens/s over {name}",
                    ExpectedLimit(aim.least_gain, is_minimum=True, unit="x", digits=2),
                    gain.in_flight / base,
                )
            )
    return claims


def run(options: ExperimentOptions) -> ExperimentResult:
    """Simulate the trials."""
    options = replace(options, requests=SIMULATED_REQUESTS)
    cases = [(L20_32B, 1), (L20_32B, 32), *((setting, 1) for setting in WEAK_LINKS)]
    trials = make_trials(cases, options)
    records = map_parallel(simulate_trial, trials, options.jobs, options.progress)
    runs = [TrialRun(*pair) for pair in zip(trials, records, strict=True)]
    gains = compare(runs)
    rows = [
        [
            str(gain.trial.setting),
            str(gain.streams),
            show_value(gain.config.synthetic_acceptance_rate),
            str(gain.config.num_speculative_tokens),
            *map(show_value, gain[1:]),
            show_value(gain.in_flight / gain.without),
            show_value(gain.in_flight / gain.one_window),
        ]
        for gain in gains
    ]
    charted = gains[-1].config
    bars = {
        f"{gain.trial.setting}, streams: {gain.streams}": {
            "one window": gain.one_window / gain.without,
            "in flight": gain.in_flight / gain.without,
        }
        for gain in gains
        if gain.config == charted
    }
    chart_title = (
        f"{charted.num_speculative_tokens} guesses, right at {charted.synthetic_acceptance_rate:g}"
    )
    header = ["setting", "streams", "right", "guesses", "none", "one window", "in flight"]
    text = (
        f"Simulated, {options.requests} requests of each stream. {EXPLANATION} Output tokens/s:\n\n"
        + format_table([*header, "in flight / none", "in flight / one"], rows)
    )
    return ExperimentResult(
        "Speculation over pipelines",
        text,
        emulated_claims(runs, POLICY),
        {
            "speculation.svg": lambda path: plot_bars(
                bars, path, "output tokens/s / without speculation", chart_title
            )
        },
        reference=OWN_REFERENCE,
    )


def read_config(trial: SimulationTrial) -> SpeculativeConfig:
    """Return the speculation of a trial that has one."""
    config: SpeculativeConfig = dict(trial.options)["speculative_config"]
    return config
