"""Driver, scheduler and sampler speculate under everything at once: texts, budgets, nothing left.

The stages compute what is in their KV caches (tests/support/engines/scripted_pipeline.py).
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from gllm.runtime.worker import sampling
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.speculative_config import SpeculativeConfig
from tests.support.engines.scripted_pipeline import (
    VOCABULARY,
    ScriptedDrafter,
    ScriptedPipeline,
)

MAX_MODEL_LEN = 64
STEPS_PER_LOAD = 500
EVENTS = (
    "windows",
    "windows behind windows",
    "void windows",
    "aborted windows",
    "guesses beside prefill",
    "chunks",
    "preemptions",
    "prefix hits",
    "right guesses",
    "wrong guesses",
)
"""Events that have to happen in a load: otherwise it shows nothing about them."""


def random_config(rng: Random, stages: int) -> SchedulerConfig:
    """A small cache, so that sequences are preempted, and chunks of a few tokens."""
    block_size = rng.choice([1, 4, 16])
    num_full = MAX_MODEL_LEN // block_size
    config = SchedulerConfig(
        policy=rng.choice(["throttle", "throttle-paper", "sarathi"]),
        max_prefill_tokens=rng.choice([8, 24, 64]),
        min_prefill_tokens=rng.choice([1, 8]),
        max_num_batched_tokens=rng.choice([12, 40, 90]),
        max_num_seqs=rng.choice([2, 5, 12]),
        max_in_flight=rng.choice([None, None, stages, 3 * stages]),
        kv_threshold=rng.choice([0.0, 0.05]),
        ridge_tokens=rng.choice([None, 200]),
        async_scheduling=rng.random() < 0.5,
        block_size=block_size,
        speculative_config=SpeculativeConfig(
            rng.choice([1, 3, 6]), max_windows_in_flight=rng.choice([None, None, 1, 2])
        ),
    )
    num_blocks = num_full + rng.choice([0, num_full, 3 * num_full])
    return config.resolve(stages, num_blocks, MAX_MODEL_LEN)


def random_prompt(rng: Random, pipeline: ScriptedPipeline) -> list[int]:
    """A prompt that begins like many others, or a text that another request has got so far."""
    if pipeline.clients and rng.random() < 0.4:
        latest = sorted(pipeline.clients)[-8:]
        text = pipeline.clients[rng.choice(latest)].reference.tokens
        return [*text[: MAX_MODEL_LEN - 2], rng.randrange(VOCABULARY)]
    prompt_len = rng.randint(1, 40)
    num_common = rng.choice([0, prompt_len // 2, prompt_len])
    return [7] * num_common + rng.choices(range(VOCABULARY), k=prompt_len - num_common)


def random_fields(rng: Random, pipeline: ScriptedPipeline) -> dict[str, Any]:
    """A request with a priority, choices, stop tokens or log-probabilities, or none of them."""
    prompt = random_prompt(rng, pipeline)
    return {
        "prompt": prompt,
        "max_tokens": rng.randint(1, MAX_MODEL_LEN - len(prompt)),
        "priority": rng.choice([0, 0, 0, 1, -1]),
        "n": rng.choice([1, 1, 1, 3]),
        "stop_ids": rng.sample(range(VOCABULARY), rng.choice([0, 0, 2])),
        "cache_salt": rng.choice(["", "", "salt"]),
        "logprobs": rng.choice([None, 2]),
    }


def run_load(pipeline: ScriptedPipeline, rng: Random, num_steps: int) -> Counter[str]:
    """Submit, abort and commit at random; check all that is left, and return what has happened."""
    seq, arrivals = 0, rng.choice([0.05, 0.2, 0.6])
    for _ in range(num_steps):
        if rng.random() < arrivals and len(pipeline.alive) < 16:
            fields = random_fields(rng, pipeline)
            pipeline.submit(seq, **fields)
            seq += fields["n"]
        if rng.random() < 0.03 and pipeline.alive:
            pipeline.abort(rng.sample(sorted(pipeline.alive), 1))
        pipeline.run_ahead()
        if pipeline.plans:
            pipeline.commit()
    pipeline.drain()
    pipeline.check_end(seq)
    return pipeline.counts


def run_loads(rng: Random, stages: int, num_steps: int) -> Counter[str]:
    """Run loads of random configurations, of so many steps together."""
    counts: Counter[str] = Counter()
    for begin in range(0, num_steps, STEPS_PER_LOAD):
        acceptance = rng.choice([0.0, 0.5, 0.8, 0.95])
        pipeline = ScriptedPipeline(random_config(rng, stages), rng, acceptance)
        counts += run_load(pipeline, rng, min(STEPS_PER_LOAD, num_steps - begin))
    return counts


@pytest.mark.parametrize(
    ("stages", "num_steps"),
    [
        *((stages, 120) for stages in range(1, 5)),
        *(pytest.param(stages, 5_000, marks=pytest.mark.full) for stages in range(1, 5)),
        *(pytest.param(stages, 25_000, marks=pytest.mark.long) for stages in range(1, 5)),
    ],
)
def test_texts_and_budgets_are_kept_and_nothing_is_left(stages: int, num_steps: int) -> None:
    """Under aborts, preemption, priorities, prefix hits, chunks, choices and several windows."""
    counts = run_loads(Random(stages), stages, num_steps)
    if num_steps > STEPS_PER_LOAD:
        missing = {event for event in EVENTS if not counts[event]}
        # One stage with placeholders has one window of a sequence at a time.
        assert not missing, counts


@pytest.mark.parametrize("stages", [3, pytest.param(4, marks=pytest.mark.full)])
def test_a_last_stage_that_misses_rejections_changes_no_text(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver decides by its own tokens what was accepted: it drops what should not be there."""
    monkeypatch.setattr(sampling, "is_void", lambda metadata, window: False)
    config = SchedulerConfig(speculative_config=SpeculativeConfig(3)).resolve(stages, 200, 64)
    pipeline = ScriptedPipeline(config, Random(stages), acceptance=0.6)
    for seq in range(2):
        pipeline.submit(seq, [seq, 1, 2], 60, logprobs=1)
    pipeline.drain()
    pipeline.check_end(2)
    assert pipeline.counts["void windows"] == 0, "the stage has returned samples for all of them"
    assert pipeline.counts["windows behind windows"] > 10


class FirstWrongDrafter(ScriptedDrafter):
    """Guesses rightly, but for the first token behind other guesses; goes on as after that."""

    def draft(self, token_ids: "array[int]", guesses: Sequence[int], num_tokens: int) -> list[int]:
        reference = self.go_on(token_ids, guesses)
        num_known = len(reference.tokens)
        for number in range(num_tokens):
            is_wrong = bool(guesses) and not number
            reference.extend([(reference.next_token + is_wrong) % VOCABULARY])
        return reference.tokens[num_known:]


def test_the_first_guess_behind_a_window_is_verified() -> None:
    """No sample of its row verifies it, but the last one of the window before."""
    config = SchedulerConfig(speculative_config=SpeculativeConfig(3)).resolve(3, 200, 64)
    pipeline = ScriptedPipeline(config, Random(1), 1.0, FirstWrongDrafter)
    pipeline.submit(0, [1, 2, 3], 61)
    pipeline.drain()
    pipeline.check_end(1)
    assert pipeline.counts["void windows"] > 20
