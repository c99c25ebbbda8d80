"""Speculation: draft tokens behind the known tokens of a decode, verified in one row with them.

A window is a row whose last tokens are guesses. The last stage samples at each of them and at the
known token before, with the random numbers that the tokens have without speculation, and keeps the
samples up to the first that differs from its guess. The text is therefore the same; see
docs/speculation.md. This module decides the guesses and their number; it knows no blocks and plans.
"""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from math import inf
from typing import Protocol

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.ngram_drafter import NgramDrafter
from gllm.scheduler.reported_drafter import ReportedDrafter
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.speculative_config import SpeculativeConfig
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import DECAY_PER_STEP, OnlineStepCurveFit, StepTimeCurve
from gllm.scheduler.synthetic_drafter import SyntheticDrafter

INITIAL_ACCEPTANCE = 0.7
"""Share of right guesses that is assumed before any is verified."""
INITIAL_GUESSES = 4.0
"""Guesses as which the initial share counts, and for a sequence that of all sequences."""
SEQUENCE_DECAY, ENGINE_DECAY = 0.9, 0.99
"""Factors on earlier guesses, of the sequence and of all, with each verified window."""
SEQUENCE_UNUSED_DECAY, ENGINE_UNUSED_DECAY = 0.98, 0.999
"""The same with each row whose guesses were not worth their time: they are tried again later."""
LONGEST_STEP = 3.0
"""Interval of a step, over the predicted one, above which it counts as this."""
LEAST_CHANCE = 0.1
"""Least probability of the first guess of a row that continues others in flight. Such a row costs
the others little where stages are idle, but a restart behind a wrong guess may wait for it."""


class Drafter(Protocol):
    """Interface of what guesses the next tokens of one sequence."""

    def draft(self, token_ids: "array[int]", guesses: Items[int], num_tokens: int) -> list[int]:
        """Return up to `num_tokens` tokens that may follow; an empty list if there is no guess.

        Args:
            token_ids: prompt and output, which have only grown since the last call.
            guesses: draft tokens behind them that are not verified yet.
            num_tokens: most tokens to return, at least 1.
        """


CreateDrafter = Callable[[SpeculativeConfig], Drafter]
DRAFTERS: dict[str, CreateDrafter] = {
    "draft_model": ReportedDrafter,
    "mtp": ReportedDrafter,
    "ngram": NgramDrafter,
    "synthetic": SyntheticDrafter,
}
"""Drafters by `method`; gllm.scheduler.speculative_config.DRAFT_METHODS lists the names."""


class AcceptanceEstimate:
    """Decaying share of right guesses among those that were verified.

    Args:
        decay: factor on the earlier guesses with each window.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._num_right = self._num_verified = 0.0

    def share(self, prior: float) -> float:
        """Return the share, 0 to 1; the prior counts as INITIAL_GUESSES guesses."""
        num_right = self._num_right + INITIAL_GUESSES * prior
        return num_right / (self._num_verified + INITIAL_GUESSES)

    def on_verified(self, num_guesses: int, num_right: int) -> None:
        """Add a window; guesses behind the first wrong one say nothing."""
        self.forget(self._decay)
        self._num_right += num_right
        self._num_verified += min(num_right + 1, num_guesses)

    def forget(self, decay: float) -> None:
        """Lower the weight of the windows so far."""
        self._num_right *= decay
        self._num_verified *= decay


class GuessCost:
    """Seconds that a guess adds to a step beyond those of a token of prefill.

    Unlike prefill, each guess passes the LM head, is sampled and reads the whole context. The cost
    is a decaying least-squares fit of the time by which steps with windows exceed the step time
    curve, with INITIAL_GUESSES guesses that cost nothing as prior; without windows it falls to 0
    again, so that guesses are tried once more.
    """

    def __init__(self) -> None:
        self._product = self._square = 0.0

    @property
    def seconds(self) -> float:
        """The cost; 0 before the first window."""
        return max(0.0, self._product / (self._square + INITIAL_GUESSES**2))

    def observe_step(self, work: StageWork, seconds: float, curve: StepTimeCurve) -> None:
        """Add a step: its work and interval, above 0."""
        self._product *= DECAY_PER_STEP
        self._square *= DECAY_PER_STEP
        windows = work.prefill_chunks[: work.num_windows]
        num_guesses = sum(num_tokens - 1 for _, num_tokens in windows)
        if not num_guesses:
            return
        # As if each window were a decode: what its guesses attend to is part of their cost.
        num_context = work.num_decode_context_tokens + sum(start + 1 for start, _ in windows)
        expected = curve.seconds(work.num_tokens, work.num_prefill_pairs, num_context)
        # A step beside a busy process may take any time.
        excess = min(seconds, LONGEST_STEP * expected) - expected
        self._product += excess * num_guesses
        self._square += num_guesses**2


class MicroBatchYield:
    """Tokens that a micro-batch yields per predicted second, as guesses are added to it.

    As many guesses of a sequence are added as increase it most: where a step of n + 1 tokens takes
    longer than one of n in proportion to the tokens of the text that it adds, guesses slow other
    sequences down by more than they gain.

    Args:
        curve: step time by tokens; its unit does not matter.
        num_rows: decodes of the micro-batch, each of which yields a token.
        num_prefill_tokens: prefill beside them, which counts as yield.
        guess_seconds: what a guess takes longer than a token of the curve, in its unit.
        num_missed: rows of one token that a sequence gives up for its guesses.
    """

    def __init__(
        self,
        curve: StepTimeCurve,
        num_rows: int,
        num_prefill_tokens: int,
        guess_seconds: float = 0.0,
        num_missed: float = 0.0,
    ) -> None:
        self._curve = curve
        self._num_missed = num_missed
        self._guess_seconds = guess_seconds
        self._num_tokens = float(num_rows + num_prefill_tokens)
        self._num_guesses = 0
        self._yield = self._num_tokens

    def add(self, num_guesses: int, acceptance: float, chance: float = 1.0) -> int:
        """Add guesses of a sequence and return how many are worth their time.

        Args:
            num_guesses: guesses that there are.
            acceptance: probability that a guess is right if all before it are.
            chance: probability that all guesses before these are right.
        """
        best, best_gain, gain = 0, 0.0, 0.0
        best_rate, num_missed = self._rate(0, 0.0, 0.0), self._num_missed
        for count in range(1, num_guesses + 1):
            chance *= acceptance
            gain += chance
            rate = self._rate(count, gain, num_missed)
            if rate > best_rate:
                best, best_gain, best_rate = count, gain, rate
        if best:
            self._num_guesses += best
            self._num_tokens += best - num_missed
            self._yield += best_gain - num_missed
        return best

    def _rate(self, num_guesses: int, gain: float, num_missed: float) -> float:
        """Return the tokens per second with further guesses, in the place of missed rows."""
        num_yielded = self._yield + gain - num_missed
        if num_yielded <= 0:
            return 0.0
        num_tokens = max(0.0, self._num_tokens + num_guesses - num_missed)
        seconds = self._curve.seconds(num_tokens)
        seconds += self._guess_seconds * (self._num_guesses + num_guesses)
        return num_yielded / seconds if seconds > 0 else inf


class _SequenceState:
    """Drafter and acceptance of one sequence."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.acceptance = AcceptanceEstimate(SEQUENCE_DECAY)
        self.num_accepted = self.num_rejected = 0


class Speculation:
    """Chooses the draft tokens of decodes.

    Args:
        config: resolved configuration with a `speculative_config`.
        curve_fit: fitted step time.
        create_drafter: creates the drafter of a sequence; None for the configured method.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        curve_fit: OnlineStepCurveFit,
        create_drafter: CreateDrafter | None = None,
    ) -> None:
        assert config.speculative_config is not None
        self._config = config.speculative_config
        self._curve_fit = curve_fit
        self._create_drafter = create_drafter or DRAFTERS[self._config.method]
        self._async_scheduling = config.async_scheduling
        self._has_lanes = config.num_lanes > 1
        self.is_paused = False
        """True while no sequence may have several rows in flight."""
        self._guess_cost = GuessCost()
        self._sequences: dict[int, _SequenceState] = {}
        self._acceptance = AcceptanceEstimate(ENGINE_DECAY)

    def prepare(self, sequence: Sequence) -> bool:
        """Choose the draft tokens of a decode's next row; return False if it has no row now.

        Without known tokens that are not scheduled, the next row consists of guesses: it continues
        the rows in flight, whose own guesses may be wrong. With async scheduling it is a
        placeholder instead, unless `should_wait`.
        """
        known_end, scheduled_end = sequence.num_tokens, sequence.num_scheduled_tokens
        sequence.draft_token_ids = []
        if self.is_paused and sequence.num_rows_in_flight:
            return False
        if scheduled_end < known_end:
            sequence.draft_token_ids = self._draft(sequence, known_end, is_continued=False)
            return True
        # All tokens in flight are known or guessed.
        is_guessed = scheduled_end == known_end + len(sequence.guesses)
        if is_guessed and self._may_continue(sequence):
            sequence.draft_token_ids = self._draft(sequence, scheduled_end, is_continued=True)
        return bool(sequence.draft_token_ids) or self.may_run_ahead(sequence)

    def may_run_ahead(self, sequence: Sequence) -> bool:
        """Return True if a placeholder may follow the rows in flight of a decode.

        The last of these samples the token that the placeholder stands for.
        """
        return (
            self._async_scheduling
            and not sequence.guesses
            and sequence.num_scheduled_tokens + 1
            < sequence.prompt_len + sequence.request.max_tokens
        )

    def start_micro_batch(
        self, num_rows: int, num_prefill_tokens: int, num_context: float, num_decodes: int
    ) -> MicroBatchYield:
        """Return the yield of a micro-batch without guesses.

        Args:
            num_rows: see MicroBatchYield, like the next one.
            num_prefill_tokens: see there.
            num_context: tokens that its decodes attend to together.
            num_decodes: sequences that decode, in this micro-batch and others.
        """
        # With async scheduling the next micro-batch is filled before a window is verified, so that
        # its sequence misses a row. A sequence alone misses nothing.
        num_missed = 1 - 1 / max(1, num_decodes) if self._async_scheduling else 0.0
        seconds = self._guess_cost.seconds if self._curve_fit.is_fitted else 0.0
        curve = self._curve_fit.curve.with_context(num_context)
        return MicroBatchYield(curve, num_rows, num_prefill_tokens, seconds, num_missed)

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Learn from a step: its work and its interval, above 0."""
        if self._curve_fit.is_fitted:
            self._guess_cost.observe_step(work, seconds, self._curve_fit.curve)

    def count_useful(
        self, sequence: Sequence, num_guesses: int, micro_batch: MicroBatchYield
    ) -> int:
        """Return how many of a sequence's next guesses are worth their time in a micro-batch.

        Args:
            sequence: the sequence.
            num_guesses: guesses that there are.
            micro_batch: yield of the micro-batch, to which the guesses are added.
        """
        state = self._sequences[sequence.seq]
        acceptance = self._acceptance_of(state)
        chance = acceptance ** len(sequence.guesses)
        if sequence.guesses and chance * acceptance < LEAST_CHANCE:
            return 0
        count = micro_batch.add(num_guesses, acceptance, chance)
        if not count and not sequence.guesses:
            self._forget(state)
        return count

    def count_next_drafts(self, sequences: list[Sequence], micro_batch: MicroBatchYield) -> int:
        """Return how many draft tokens the last stage computes behind each sample of a step.

        As many as are worth their time for the sequence with the most right guesses; 0 if none is.

        Args:
            sequences: those that the step samples, and that go on behind it.
            micro_batch: yield of the micro-batch that verifies the drafts, without guesses.
        """
        states = [self._state_of(sequence) for sequence in sequences]
        acceptance = max(self._acceptance_of(state) for state in states)
        count = micro_batch.add(self._config.num_speculative_tokens, acceptance)
        if count:
            num_windows = self._config.max_windows_in_flight or 1
            return (count + 1) * num_windows - 1
        for state in states:
            self._forget(state)
        return 0

    def on_drafted(self, sequence: Sequence, draft_token_ids: Items[int]) -> None:
        """Keep the draft tokens that the last stage has computed behind the known tokens."""
        drafter = self._state_of(sequence).drafter
        if isinstance(drafter, ReportedDrafter):
            drafter.report(sequence.num_tokens, draft_token_ids)

    def should_wait(self, sequence: Sequence, micro_batch: MicroBatchYield) -> bool:
        """Return True if a sequence gains by a window behind the token that is being sampled.

        Windows in turn with missed rows are compared with placeholders; that the first window
        misses a row more is not counted. Its guesses are added to the micro-batch already, so that
        not all sequences wait at once. For the arguments see `count_useful`.
        """
        state = self._sequences[sequence.seq]
        num_guesses = len(sequence.draft_token_ids) - 1  # The first one is of that token.
        if micro_batch.add(num_guesses, self._acceptance_of(state)):
            return True
        self._forget(state)
        return False

    def _acceptance_of(self, state: _SequenceState) -> float:
        return state.acceptance.share(self._acceptance.share(INITIAL_ACCEPTANCE))

    def _forget(self, state: _SequenceState) -> None:
        """Lower the weight of earlier windows, so that guesses are tried again later."""
        state.acceptance.forget(SEQUENCE_UNUSED_DECAY)
        self._acceptance.forget(ENGINE_UNUSED_DECAY)

    def on_verified(self, seq: int, num_guesses: int, num_right: int) -> None:
        """Learn from a window that began rightly."""
        state = self._sequences[seq]
        self._acceptance.on_verified(num_guesses, num_right)
        state.acceptance.on_verified(num_guesses, num_right)
        state.num_accepted += num_right
        state.num_rejected += num_guesses - num_right

    def on_void(self, seq: int, num_guesses: int) -> None:
        """Count the guesses of a window that began with a wrong one."""
        self._sequences[seq].num_rejected += num_guesses

    def count_verified(self, seq: int) -> tuple[int, int]:
        """Return how many guesses of a sequence were right, and how many were not used."""
        state = self._sequences.get(seq)
        return (0, 0) if state is None else (state.num_accepted, state.num_rejected)

    def release(self, seq: int) -> None:
        """Forget a sequence."""
        self._sequences.pop(seq, None)

    def _may_continue(self, sequence: Sequence) -> bool:
        """Return True if rows of guesses may follow those of a sequence that are in flight.

        None follows a prefill in a lane of its own, nor as many windows as are allowed. With async
        scheduling no guess follows another in flight: one stage has no idle time to fill.
        """
        if self._async_scheduling:
            return not sequence.guesses
        most = self._config.max_windows_in_flight
        if most is not None and sequence.num_rows_in_flight >= most:
            return False
        return not self._has_lanes or sequence.num_computed_tokens >= sequence.num_prefill_tokens

    def _draft(self, sequence: Sequence, start: int, is_continued: bool) -> list[int]:
        """Return draft tokens for the positions from `start` on.

        The last token of the output is never an input, so that it is never guessed.

        Args:
            sequence: the sequence.
            start: position of the first one.
            is_continued: True if the first one stands where a window has its known token.
        """
        num_left = sequence.prompt_len + sequence.request.max_tokens - 1 - start
        num_tokens = min(self._config.num_speculative_tokens + is_continued, num_left)
        if num_tokens < 1:
            return []
        drafter = self._state_of(sequence).drafter
        return drafter.draft(sequence.token_ids, sequence.guesses, num_tokens)

    def _state_of(self, sequence: Sequence) -> _SequenceState:
        """Return the state of a sequence, which may be new."""
        state = self._sequences.get(sequence.seq)
        if state is None:
            state = _SequenceState(self._create_drafter(self._config))
            self._sequences[sequence.seq] = state
        return state
