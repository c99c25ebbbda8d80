"""Models with recurrent layers under the scheduler: texts that begin with cached states."""

from pathlib import Path
from typing import Any

import pytest

from gllm.messages.sampling import SampleDetails
from gllm.scheduler.plan import StepOutput
from tests.runtime.worker.test_greedy import CHUNKED, Scheduled, greedy_tokens
from tests.support.models.tiny_models import save

FAMILY = "qwen3-next"
BLOCK = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(FAMILY, tmp_path_factory.mktemp("states"))


class Engine(Scheduled):
    """Scheduler and stages, and how much of each prompt was cached."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_cached: list[int] = []

    def generate(self, prompt: list[int], n: int = 1) -> list[int]:
        """Run a request to its end; each choice has the greedy text of transformers."""
        seq = max(self.generated, default=-1) + 1
        self.add(seq, prompt, n)
        generated = self.run()
        answer = generated[seq]
        assert answer == greedy_tokens(FAMILY, tuple(prompt), tuple(answer))
        assert all(generated[seq + choice] == answer for choice in range(n))
        return answer

    def _commit(self) -> tuple[StepOutput, list[SampleDetails]]:
        output, details = super()._commit()
        self.num_cached += [first.num_cached_tokens for first in output.first_tokens]
        return output, details


def tokens_of(seed: int, length: int) -> list[int]:
    return [(7 * i * i + 13 * seed + 5 * i) % 120 + 3 for i in range(length)]


@pytest.mark.parametrize(
    ("stages", "options"),
    [(1, {}), (2, CHUNKED), pytest.param(4, CHUNKED, marks=pytest.mark.full)],
)
def test_prompts_with_a_common_beginning(
    folder: Path, stages: int, options: dict[str, Any]
) -> None:
    """Trap: with the KV blocks of a prefix and without its state, the text is another one."""
    engine = Engine(folder, stages, options=options)
    common = tokens_of(1, 41)
    prompts = [common + tokens_of(seed, 20 + seed) for seed in range(2, 6)]
    for prompt in (*prompts, prompts[0]):
        engine.generate(prompt)
    assert engine.num_cached == [0, 0, 40, 40, 56]


def test_choices_start_from_the_state_of_the_prompt(folder: Path) -> None:
    engine = Engine(folder, 2)
    engine.generate(tokens_of(3, 45), n=3)
    assert engine.scheduler.stats().prefill_tokens == 45 + 2 * 5


def test_each_turn_of_a_chat_starts_where_the_last_one_ended(folder: Path) -> None:
    engine = Engine(folder, 2, options=CHUNKED)
    history = tokens_of(9, 30)
    for turn in range(5):
        num_earlier = len(history) if turn else 0
        history += tokens_of(turn, 3)
        history += engine.generate(history)
        # The last token of the answer has not been computed.
        assert engine.num_cached[-1] >= num_earlier - BLOCK
