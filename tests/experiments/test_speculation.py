"""The experiment on windows in flight."""

from experiments import speculation
from experiments.base import ExperimentOptions
from experiments.trials import L20_32B, TrialRun, simulate_trial

OPTIONS = ExperimentOptions(requests=2, quick=True, progress=False, jobs=1)


def test_each_trial_is_beside_one_window_and_none() -> None:
    trials = speculation.emulated_trials(OPTIONS)
    runs = [TrialRun(trial, simulate_trial(trial)) for trial in trials]
    (gain,) = speculation.compare(runs)
    assert (gain.trial.setting, gain.streams) == (L20_32B, 1)
    assert (gain.config.num_speculative_tokens, gain.config.synthetic_acceptance_rate) == (1, 0.9)
    # One guess that is right at 90 %: at most 1.9 tokens per passage of the four stages.
    assert 1.6 < gain.one_window / gain.without < 1.9
    assert 1.5 < gain.in_flight / gain.one_window < 4
    (claim,) = speculation.emulated_claims(runs, "throttle")
    assert claim.ours == gain.in_flight / gain.one_window


def test_the_page_has_a_row_for_each_case() -> None:
    result = speculation.run(OPTIONS)
    assert result.text.count(str(L20_32B)) == 1
    assert len(result.claims) == 1
