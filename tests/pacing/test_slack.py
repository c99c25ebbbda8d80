"""Just-in-time slack: the three cases against the paper's formulas, and the clock of a stage."""

from fractions import Fraction
from itertools import product

import pytest

from gllm.pacing.slack import MAX_ROUNDS, StageClock, decode_round_seconds

MICROSECOND = 1e-6


def seconds(milliseconds: Fraction | int) -> float:
    return float(Fraction(milliseconds) / 1000)


RUNNING = [
    (start_ms, stage_ms, elapsed_ms)
    for start_ms, stage_ms, elapsed_ms in product(
        (0, 1500, 86_400_000), (2, 11, 29, 75), (0, 1, 7, 40)
    )
]
"""Cases 1 and 2: start of the decode run, its predicted time, time since the start, in ms."""

IDLE = [
    (end_ms, stages_ms, latency_ms, megabits, num_tokens, elapsed_ms)
    for (end_ms, elapsed_ms), stages_ms, (latency_ms, megabits), num_tokens in product(
        ((0, 3), (2500, 40)),
        ((11, 11, 12), (7, 29), (30, 20, 10, 5)),
        ((30, 100), (10, 60), (50, 400)),
        (1, 5, 64),
    )
]
"""Case 3: end of the last run, time of each stage, delay and rate of each link, tokens, time since
the end."""


def test_slack_while_a_decode_runs() -> None:
    """T_a = T_i(n) - (t_c - t_s)."""
    for start_ms, stage_ms, elapsed_ms in RUNNING:
        clock = StageClock()
        clock.on_decode_started(seconds(start_ms), seconds(stage_ms))
        slack = clock.slack_seconds(seconds(start_ms + elapsed_ms))
        assert slack == pytest.approx(seconds(stage_ms - elapsed_ms), abs=MICROSECOND)


def test_slack_between_decodes() -> None:
    """T_a = t_p + T_o + T_m - t_c, with 13,312 bytes per token, and 2 on the way back."""
    for case in IDLE:
        check_slack_between_decodes(*case)


def check_slack_between_decodes(
    end_ms: int,
    stages_ms: tuple[int, ...],
    latency_ms: int,
    megabits: int,
    num_tokens: int,
    elapsed_ms: int,
) -> None:
    activation_bits, token_bits = 8 * 13_312, 8 * 2
    num_hops = len(stages_ms)
    # bits / (Mbit/s) is in microseconds.
    sending_ms = Fraction(
        num_tokens * (activation_bits * (num_hops - 1) + token_bits), megabits * 1000
    )
    expected_ms = end_ms + sum(stages_ms) + num_hops * latency_ms + sending_ms
    expected_ms -= end_ms + elapsed_ms

    bytes_per_second = megabits * 1e6 / 8
    sizes = [13_312 * num_tokens] * (num_hops - 1) + [2 * num_tokens]
    transfers = [seconds(latency_ms) + size / bytes_per_second for size in sizes]
    clock = StageClock()
    clock.on_decode_started(seconds(end_ms), 0.0)
    clock.on_decode_finished(
        seconds(end_ms), decode_round_seconds(map(seconds, stages_ms), transfers)
    )
    slack = clock.slack_seconds(seconds(end_ms + elapsed_ms))
    assert slack == pytest.approx(seconds(expected_ms), abs=MICROSECOND)


def test_clock_follows_several_micro_batches() -> None:
    """The oldest run comes around first; one that is late by a round has ended."""
    clock = StageClock()
    assert clock.slack_seconds(0.0) is None
    for start in (0.0, 1.0, 2.0):
        clock.on_decode_started(start, 0.5)
        clock.on_decode_finished(start + 0.5, 10.0)
    assert clock.slack_seconds(3.0) == pytest.approx(0.5 + 10.0 - 3.0)
    clock.on_decode_started(10.25, 0.5)
    assert clock.slack_seconds(10.5) == pytest.approx(0.25)
    clock.on_decode_finished(10.75, 10.0)
    assert clock.slack_seconds(11.0) == pytest.approx(1.5 + 10.0 - 11.0)
    # The second round is late by 10 s at 21.5, the third at 22.5, the first again at 30.75.
    assert clock.slack_seconds(21.4) == pytest.approx(11.5 - 21.4)
    assert clock.slack_seconds(21.6) == pytest.approx(12.5 - 21.6)
    assert clock.slack_seconds(22.6) == pytest.approx(20.75 - 22.6)
    assert clock.slack_seconds(31.0) is None


def test_clock_keeps_a_bounded_number_of_rounds() -> None:
    clock = StageClock()
    for number in range(3 * MAX_ROUNDS):
        clock.on_decode_finished(float(number), 1e6)
    assert clock.slack_seconds(0.0) == pytest.approx(2 * MAX_ROUNDS + 1e6)
