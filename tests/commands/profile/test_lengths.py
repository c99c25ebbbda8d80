"""`gllm profile lengths`: outputs of step logs, and the classifier that they train."""

from pathlib import Path
from random import Random

import pytest

from gllm.__main__ import main
from gllm.commands.profile.lengths import read_outputs
from gllm.observability.step_log import (
    AbortEvent,
    AddEvent,
    CommitEvent,
    RestartEvent,
    StartEvent,
    StepLogEvent,
    StepLogWriter,
)
from gllm.routing.lengths.evaluation import LoggedOutput
from gllm.routing.lengths.features import HEAD_TOKENS, TAIL_TOKENS
from gllm.routing.lengths.registry import make_length_predictor
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.output_lengths import LengthQuery
from gllm.scheduler.plan import SampledToken, StepResult

SCHEDULER = SchedulerConfig(num_blocks=64)
STOP = 2


def start(warm_ups: int = 0) -> StartEvent:
    return StartEvent(0.0, "demo", [1], SCHEDULER, "driver", warm_ups)


def commit(*tokens: SampledToken) -> CommitEvent:
    return CommitEvent(1.0, StepResult(0, list(tokens)))


def add(seq: int, prompt: list[int], max_tokens: int = 9, **fields: object) -> AddEvent:
    return AddEvent(0.5, seq, prompt, max_tokens, [STOP], **fields)  # type: ignore[arg-type]


def test_outputs_that_ended_by_themselves_are_read() -> None:
    token, end = SampledToken(1, 0, 7), SampledToken(1, 0, STOP)
    events: list[StepLogEvent] = [
        start(warm_ups=1),
        add(0, [0], 5),
        add(1, [5, 6]),
        # Two choices, of which one is aborted; the other one ends at its limit.
        add(2, [8], 3, n=2),
        commit(SampledToken(0, 0, STOP), token, SampledToken(2, 0, 7), SampledToken(3, 0, 7)),
        AbortEvent(1.0, [3]),
        # Tokens behind a stop are discarded; guesses give several at once.
        commit(token, SampledToken(2, 0, 7, further_token_ids=(7, 7))),
        commit(end._replace(further_token_ids=(7,))),
        commit(token),
        # A prefill for another engine, a request for one token, one that fails.
        add(4, [1], 5, kv_ticket=3),
        add(5, [1], 1),
        add(6, [1], 5),
        commit(SampledToken(4, 0, STOP), SampledToken(5, 0, 7), SampledToken(6, 0, 0, "failed")),
        commit(SampledToken(6, 0, STOP)),
        # What was running at a restart is added again, with its output so far.
        add(7, [9], 9),
        commit(SampledToken(7, 0, 7)),
        RestartEvent(2.0, 2, "killed", 1, [1], SCHEDULER),
        add(0, [9], 9, outputs=[[7]]),
        commit(SampledToken(0, 0, 7)),
        commit(SampledToken(0, 0, STOP)),
    ]
    assert read_outputs(events) == [
        LoggedOutput(LengthQuery(1, 3, [8]), 3),
        LoggedOutput(LengthQuery(2, 9, [5, 6]), 3),
        LoggedOutput(LengthQuery(1, 9, [9]), 3),
    ]


def test_long_prompts_keep_what_predictors_read() -> None:
    prompt = list(range(5000))
    events: list[StepLogEvent] = [
        start(),
        add(0, prompt),
        commit(SampledToken(0, 0, STOP)),
    ]
    (output,) = read_outputs(events)
    assert output.query.num_prompt_tokens == 5000
    assert output.query.prompt == prompt[:HEAD_TOKENS] + prompt[-TAIL_TOKENS:]


def write_log(path: Path, count: int, seed: int) -> None:
    """Write a log of requests of two kinds, with about 4 and 40 output tokens."""
    rng, log = Random(seed), StepLogWriter(path)
    log.write(start())
    for seq in range(count):
        kind = rng.randrange(2)
        prompt = [*([30 + kind] * 3), *(rng.randrange(100, 900) for _ in range(rng.randint(4, 40)))]
        log.write(add(seq, prompt, 100))
        num_tokens = round((4, 40)[kind] * rng.uniform(0.9, 1.1))
        tokens = (7,) * (num_tokens - 2)
        log.write(commit(SampledToken(seq, 0, 7, further_token_ids=(*tokens, STOP))))
    log.close()


@pytest.mark.full
def test_a_classifier_is_trained_compared_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for seed, log in enumerate(logs):
        write_log(log, 120, seed)
    output = tmp_path / "lengths.json"
    assert main(["profile", "lengths", *map(str, logs), "--output", str(output)]) == 0
    table = capsys.readouterr().out
    for name in ("by-max-tokens", "by-prompt", "nearest", "classifier"):
        assert f"| {name} " in table
    assert f"trained on 240 outputs; wrote {output}" in table
    lengths = make_length_predictor(str(output))
    for kind, num_tokens in ((0, 4), (1, 40)):
        prompt = [*([30 + kind] * 3), *range(1000, 1010)]
        estimate = lengths.estimate(LengthQuery(len(prompt), 100, prompt))
        assert estimate.likely() == pytest.approx(num_tokens, rel=0.2)


def test_too_few_outputs_and_other_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, output = tmp_path / "steps.jsonl", tmp_path / "lengths.json"
    write_log(log, 30, 0)
    assert main(["profile", "lengths", str(log), "--output", str(output)]) == 2
    assert "have 30 outputs" in capsys.readouterr().err
    log.write_text("{}\n")
    assert main(["profile", "lengths", str(log), "--output", str(output)]) == 2
    assert "not a step log's line" in capsys.readouterr().err
    assert main(["profile", "lengths", str(tmp_path / "none"), "--output", str(output)]) == 2
    assert not output.exists()
