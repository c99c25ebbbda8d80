"""Windows of guesses on a device: the outputs of the same device without guesses, in any order of
its streams."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gllm.messages.sampling import SequenceSamplingParams
from gllm.options.field_types import FieldError
from tests.runtime.worker.test_device_grammars import GRAMMAR, save_with_bytes
from tests.runtime.worker.test_device_resume import PROMPT, reported, stages_on
from tests.runtime.worker.test_device_sampling import LOOKING
from tests.support.engines.epochs import Epoch, Request, Stages, run_undisturbed
from tests.support.engines.knowing_drafter import KnowingDrafter
from tests.support.gpu.device_stage import as_on_a_device
from tests.support.gpu.fake_streams import FakeQueues

CONFIG = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
NUM_TOKENS = 20
REQUESTS = {
    "greedy": SequenceSamplingParams(temperature=0.0),
    "sampled": SequenceSamplingParams(temperature=1.2, top_p=0.9, seed=2),
    "looking back": LOOKING,
    "prompt log-probabilities": SequenceSamplingParams(seed=3, logprobs=1, prompt_logprobs=1),
    "min_tokens": SequenceSamplingParams(seed=4, min_tokens=9, banned=(40, 41, 42)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_bytes(tmp_path_factory.mktemp("llama3"))


@pytest.fixture
def queues() -> Iterator[FakeQueues]:
    with as_on_a_device(), FakeQueues(6) as device:
        yield device


def knowing(
    queues: FakeQueues,
    folder: Path,
    outputs: list[list[int]],
    acceptance: float,
    num_stages: int = 1,
    **options: Any,
) -> Stages:
    """Stages whose drafter knows the outputs of a request."""
    stages = stages_on(queues, folder, num_stages, speculative_config=CONFIG, **options)
    drafter = KnowingDrafter(len(PROMPT), outputs, acceptance)
    stages.create_drafter = lambda config: drafter
    return stages


@pytest.mark.parametrize(
    ("request_name", "acceptance", "num_stages", "options"),
    [
        ("greedy", 0.7, 1, {}),
        ("looking back", 0.7, 1, {}),
        ("prompt log-probabilities", 0.7, 2, {}),
        *(
            pytest.param(name, acceptance, stages, options, marks=pytest.mark.full)
            for name in REQUESTS
            for acceptance in (0.7, 1.0)
            for stages, options in ((1, {}), (1, {"async_scheduling": False}), (2, {}), (3, {}))
        ),
    ],
)
def test_guesses_change_no_output(
    queues: FakeQueues,
    folder: Path,
    request_name: str,
    acceptance: float,
    num_stages: int,
    options: dict[str, Any],
) -> None:
    """Also after a death at some positions, and in fewer steps where guesses are right."""
    request = Request(PROMPT, REQUESTS[request_name], NUM_TOKENS, stop_ids=[0])
    snapshots = run_undisturbed(stages_on(queues, folder, num_stages, **options), request)
    (whole,) = snapshots[-1]
    assert len(whole.tokens) > 12
    stages = knowing(queues, folder, [whole.tokens], acceptance, num_stages, **options)
    guessed = run_undisturbed(stages, request)
    (output,) = guessed[-1]
    assert reported(output) == reported(whole)
    assert len(guessed) < len(snapshots)
    for length in range(1, len(whole.tokens), 7):
        (output,) = Epoch(stages, request, [whole.cut(length, True)]).run()
        assert reported(output) == reported(whole), length


def test_choices_that_guess_what_the_others_wrote(queues: FakeQueues, folder: Path) -> None:
    """Rows of several sequences, whose penalties and bad words look back at their own guesses."""
    request = Request(PROMPT, LOOKING, NUM_TOKENS, stop_ids=[0], n=3)
    snapshots = run_undisturbed(stages_on(queues, folder, 1), request)
    whole = [reported(output) for output in snapshots[-1]]
    outputs = [output.tokens for output in snapshots[-1]]
    stages = knowing(queues, folder, outputs, 0.8)
    guessed = run_undisturbed(stages, request)
    assert [reported(output) for output in guessed[-1]] == whole
    assert len(guessed) < len(snapshots)


def test_drafts_with_weights_are_refused(queues: FakeQueues, folder: Path) -> None:
    with pytest.raises(FieldError, match="method mtp drafts with weights, which GPUs do not"):
        stages_on(queues, folder, 1, speculative_config={"method": "mtp"})


def test_sequences_with_a_grammar_have_no_guesses(queues: FakeQueues, folder: Path) -> None:
    """Beside one that has them in the same engine."""
    plain = Request(PROMPT, REQUESTS["greedy"], NUM_TOKENS, stop_ids=[0])
    bound = msgspec.structs.replace(REQUESTS["greedy"], grammar=GRAMMAR)
    request = Request(PROMPT, bound, NUM_TOKENS, stop_ids=[0])
    wholes = [
        run_undisturbed(stages_on(queues, folder, 1), each)[-1][0] for each in (plain, request)
    ]
    stages = knowing(queues, folder, [whole.tokens for whole in wholes], 1.0)
    for each, whole, has_guesses in zip((plain, request), wholes, (True, False), strict=True):
        epoch = Epoch(stages, each, [type(whole)()])
        (output,) = epoch.run()
        assert reported(output) == reported(whole)
        assert (epoch.scheduler.stats().draft_tokens > 0) == has_guesses
