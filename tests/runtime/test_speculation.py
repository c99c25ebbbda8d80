"""Stages that verify guesses compute the same outputs, bit by bit, and after a death as well."""

from functools import cache

import pytest

from gllm.runtime.worker.batch import Batch
from gllm.scheduler.plan import StepPlan
from tests.runtime.test_resume import CHOICES, PROMPT, REQUESTS, greedy, stages_of
from tests.support.engines.epochs import (
    CHUNKED,
    Epoch,
    Stages,
    run_undisturbed,
    stages_on_cpu,
)
from tests.support.engines.knowing_drafter import KnowingDrafter
from tests.support.text.grammar_writing import FOLDER

pytestmark = pytest.mark.usefixtures("compiled_kernels")


@cache
def speculating_stages(num_stages: int, **options: object) -> Stages:
    config = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return stages_on_cpu(FOLDER, num_stages, speculative_config=config, **CHUNKED, **options)


def knowing(num_stages: int, outputs: list[list[int]], acceptance: float) -> Stages:
    """Stages whose drafter knows the output of a request."""
    stages = speculating_stages(num_stages)
    drafter = KnowingDrafter(len(PROMPT), outputs, acceptance)
    stages.create_drafter = lambda config: drafter
    return stages


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("acceptance", [0.7, pytest.param(1.0, marks=pytest.mark.full)])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_kind_of_request(request_name: str, acceptance: float, num_stages: int) -> None:
    """Also after a death at some positions, and in fewer steps where guesses are right."""
    request = REQUESTS[request_name]()
    snapshots = run_undisturbed(stages_of(num_stages), request)
    (whole,) = snapshots[-1]
    stages = knowing(num_stages, [whole.tokens], acceptance)
    guessed = run_undisturbed(stages, request)
    assert guessed[-1] == [whole]
    # Tokens that a grammar forces need no guesses.
    assert len(guessed) < len(snapshots) or request.sampling.grammar
    scores_prompt = request.sampling.prompt_logprobs is not None
    for length in range(1, len(whole.tokens), 5):
        (output,) = Epoch(stages, request, [whole.cut(length, scores_prompt)]).run()
        assert output == whole, length


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("request_name", CHOICES)
def test_several_choices(request_name: str, num_stages: int) -> None:
    request = CHOICES[request_name]()
    request.n = 3
    whole = run_undisturbed(stages_of(num_stages), request)[-1]
    outputs = [output.tokens for output in whole]
    if not request.stop_ids:
        request.stop_ids = [outputs[1][7], outputs[2][9]]
        whole = run_undisturbed(stages_of(num_stages), request)[-1]
    stages = knowing(num_stages, outputs, 0.8)
    guessed = run_undisturbed(stages, request)
    assert guessed[-1] == whole
    assert stages.executors[-1].held_seqs == stages.executors[0].held_seqs


def test_steps_without_guesses_are_sampled_as_without_speculation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a step that verifies guesses has windows, as long as there is one stage."""
    request = greedy()
    request.max_tokens = 40
    (whole,) = run_undisturbed(stages_of(1), request)[-1]
    stages = knowing(1, [whole.tokens], 0.5)
    (executor,) = stages.executors
    prepare, seen = executor.prepare, set()

    def prepare_and_look(plan: StepPlan) -> Batch:
        batch = prepare(plan)
        has_guesses = any(row.num_draft_tokens for row in plan.rows)
        seen.add((has_guesses, bool(batch.sampling.windows)))
        return batch

    monkeypatch.setattr(executor, "prepare", prepare_and_look)
    assert run_undisturbed(stages, request)[-1] == [whole]
    assert seen == {(True, True), (False, False)}


def test_ngrams_of_a_text_that_repeats_itself() -> None:
    request = greedy(allowed=(40, 41, 42))
    request.max_tokens = 40
    whole = run_undisturbed(stages_of(1), request)
    stages = speculating_stages(1)
    stages.create_drafter = None
    guessed = run_undisturbed(stages, request)
    assert guessed[-1] == whole[-1]
    assert len(guessed) < len(whole)
