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
INITIAL_WAITS = 0.5
"""Rows left out before windows, per window, that are assumed before there is any window."""
SEQUENCE_DECAY, ENGINE_DECAY = 0.9, 0.99
"""Factors on earlier guesses, of the sequence and of all, with each verified window."""
SEQUENCE_UNUSED_DECAY, ENGINE_UNUSED_DECAY = 0.98, 0.999
"""The same with each row whose guesses were not worth their time: they are tried again later."""
GUESS_COST_DECAY = 0.97
"""Factor on earlier steps with windows, in the cost of a guess, with each further one."""
SCALE_DECAY = 0.9
"""Factor on earlier steps without windows, in the scale of the step time curve."""
LONGEST_STEP = 3.0
"""Interval of a step, over the predicted one, above which it counts as this."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 64
"""Rows of a sequence without guesses after the first look that found them not worth their time, and
at most; each such look doubles the pause."""
LONGEST_START_PAUSE = 16
"""Most rows of a new sequence without guesses."""
PAUSED_LOAD = 0.75
"""Share of the rows of its micro-batch below which a pause ends early."""
GAIN_PER_COST = 1.2
"""Least ratio of the tokens that the guesses of a sequence gain, to those that all sequences get in
the time that they take. Of guesses that seem to gain, those whose gain is overestimated are the
most, and a sequence that ends late because of wrong ones leaves its last steps almost empty."""
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


class DecayingRatio:
    """Ratio of two sums in which earlier events count less."""

    def __init__(self) -> None:
        self._numerator = self._denominator = 0.0

    def value(self, prior: float, weight: float = INITIAL_GUESSES) -> float:
        """Return the ratio; the prior counts as a denominator of `weight`."""
        return (self._numerator + weight * prior) / (self._denominator + weight)

    def add(self, numerator: float, denominator: float) -> None:
        """Add to both sums."""
        self._numerator += numerator
        self._denominator += denominator

    def forget(self, decay: float) -> None:
        """Lower the weight of the events so far."""
        self._numerator *= decay
        self._denominator *= decay


class AcceptanceEstimate:
    """Decaying share of right guesses among those that were verified.

    Args:
        decay: factor on the earlier guesses with each window.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._ratio = DecayingRatio()

    def share(self, prior: float) -> float:
        """Return the share, 0 to 1; the prior counts as INITIAL_GUESSES guesses."""
        return self._ratio.value(prior)

    def on_verified(self, num_guesses: int, num_right: int) -> None:
        """Add a window; guesses behind the first wrong one say nothing."""
        self._ratio.forget(self._decay)
        self._ratio.add(num_right, min(num_right + 1, num_guesses))

    def forget(self, decay: float) -> None:
        """Lower the weight of the windows so far."""
        self._ratio.forget(decay)


class WaitEstimate:
    """Rows that a sequence leaves out before its windows, per window.

    With async scheduling a sequence leaves out a row to know the token before a window. A window
    that follows another one needs none, so that the ratio is 1 for single windows and small in a
    text that is guessed all the time.

    Args:
        decay: factor on the earlier windows with each window.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._ratio = DecayingRatio()

    def waits_per_window(self, prior: float) -> float:
        """Return the ratio; the prior counts as INITIAL_GUESSES windows."""
        return self._ratio.value(prior)

    def on_wait(self) -> None:
        """Count a row that is left out before a window."""
        self._ratio.add(1, 0)

    def on_window(self) -> None:
        """Count a window."""
        self._ratio.forget(self._decay)
        self._ratio.add(0, 1)


def verify_guesses(guesses: Items[int], text: Items[int]) -> tuple[int, int]:
    """Compare guesses with the tokens of the text that have come in their place, maybe fewer.

    Returns:
        How many guesses are verified, which are those up to the first wrong one, and how many of
        these are right.
    """
    num_verified = num_right = 0
    for guess, token in zip(guesses, text, strict=False):
        num_verified += 1
        if guess != token:
            break
        num_right += 1
    return num_verified, num_right


class GuessPause:
    """Rows for which a sequence does without guesses, because they were not worth their time.

    The pause doubles with each look that finds guesses not worth their time, up to LONGEST_PAUSE.
    It ends early if the micro-batches become smaller, so that guesses cost less.

    Args:
        num_rows: rows before the first look.
    """

    def __init__(self, num_rows: int = 0) -> None:
        self._num_left = num_rows
        self._length = 0
        self._load = 0

    def is_over(self, load: int) -> bool:
        """Count a row of the sequence; return True if its guesses are to be looked at.

        load: rows of the micro-batch.
        """
        if self._num_left and load >= PAUSED_LOAD * self._load:
            self._num_left -= 1
            return False
        return True

    def on_unused(self, load: int) -> None:
        """Begin a pause, longer than the last one: guesses are not worth their time.

        load: rows of the micro-batch.
        """
        self._length = min(LONGEST_PAUSE, 2 * self._length or FIRST_PAUSE)
        self._num_left, self._load = self._length, load

    def on_used(self) -> None:
        """End the pauses: guesses are worth their time."""
        self._length = self._num_left = 0


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
        decay = GUESS_COST_DECAY if work.num_windows else DECAY_PER_STEP
        self._product *= decay
        self._square *= decay
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
        num_missed: rows of one token that a sequence gives up for its guesses, each time that it is
            absent from a micro-batch.
        idle_seconds: time without any row that it causes then, in the unit of the curve.
        num_context: tokens that the decodes attend to together; a missed row reads none.
    """

    def __init__(
        self,
        curve: StepTimeCurve,
        num_rows: int,
        num_prefill_tokens: int,
        guess_seconds: float = 0.0,
        num_missed: float = 0.0,
        idle_seconds: float = 0.0,
        num_context: float = 0.0,
    ) -> None:
        self._curve = curve
        self._num_missed = num_missed
        self._idle_seconds = idle_seconds
        self._num_absences = 0.0
        self._context_per_row = num_context / max(1, num_rows)
        self.num_rows = num_rows
        """Decodes of the micro-batch."""
        self._guess_seconds = guess_seconds
        self._num_tokens = float(num_rows + num_prefill_tokens)
        self._num_guesses = 0
        self._yield = self._num_tokens

    def count_useful(
        self, num_guesses: int, acceptance: float, chance: float = 1.0, num_absences: float = 1.0
    ) -> tuple[int, float]:
        """Return how many guesses of a sequence are worth their time, and how many will be right.

        Args:
            num_guesses: guesses that there are.
            acceptance: probability that a guess is right if all before it are.
            chance: probability that all guesses before these are right.
            num_absences: micro-batches from which the sequence is absent because of its guesses.
        """
        best, best_gain, gain = 0, 0.0, 0.0
        seconds = self._seconds(0, 0.0)
        best_rate = 0.0
        if self._yield > 0:
            best_rate = self._yield / seconds if seconds > 0 else inf
        # The time of the guesses alone counts more, so that they have to gain enough.
        plain_rate = GAIN_PER_COST * best_rate
        num_missed = num_absences * self._num_missed
        for count in range(1, num_guesses + 1):
            chance *= acceptance
            gain += chance
            further_seconds = self._seconds(count, num_absences) - seconds
            if gain - num_missed < plain_rate * further_seconds:
                continue
            further_seconds += seconds
            num_yielded = self._yield + gain - num_missed
            rate = num_yielded / further_seconds if further_seconds > 0 else inf
            if rate > best_rate:
                best, best_gain, best_rate = count, gain, rate
        return best, best_gain

    def add(
        self, num_guesses: int, acceptance: float, chance: float = 1.0, num_absences: float = 1.0
    ) -> int:
        """Add guesses of a sequence; return how many are worth their time. See `count_useful`."""
        count, gain = self.count_useful(num_guesses, acceptance, chance, num_absences)
        if count:
            num_missed = num_absences * self._num_missed
            self._num_guesses += count
            self._num_tokens += count - num_missed
            self._yield += gain - num_missed
            self._num_absences += num_absences
        return count

    def _seconds(self, num_guesses: int, num_absences: float) -> float:
        """Return the time with further guesses, in the place of missed rows."""
        num_missed = num_absences * self._num_missed
        num_tokens = max(0.0, self._num_tokens + num_guesses - num_missed)
        num_present = self.num_rows - self._num_missed * (self._num_absences + num_absences)
        num_context = self._context_per_row * max(0.0, num_present)
        seconds = self._curve.seconds(num_tokens, num_context=num_context)
        seconds += self._guess_seconds * (self._num_guesses + num_guesses)
        return seconds + self._idle_seconds * (self._num_absences + num_absences)


class _SequenceState:
    """Drafter and estimates of one sequence.

    Args:
        drafter: guesses its tokens.
        pause: rows before the first look at its guesses.
    """

    def __init__(self, drafter: Drafter, pause: int) -> None:
        self.drafter = drafter
        self.acceptance = AcceptanceEstimate(SEQUENCE_DECAY)
        self.waits = WaitEstimate(SEQUENCE_DECAY)
        self.has_waited = False
        """True from a row that was left out until the next window."""
        self.pause = GuessPause(pause)
        self.shadow_start = 0
        self.shadow_token_ids: list[int] = []
        """Guesses from a position on that no step has computed; the text shows which are right."""
        self.num_accepted = self.num_rejected = 0

    def pop_shadow(self, token_ids: "array[int]") -> tuple[int, int]:
        """Forget the guesses that no step has computed, and compare them; see `verify_guesses`."""
        guesses, self.shadow_token_ids = self.shadow_token_ids, []
        return verify_guesses(
            guesses, token_ids[self.shadow_start : self.shadow_start + len(guesses)]
        )


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
        self._scale = DecayingRatio()
        """Time of the latest decode steps without windows over that of the curve, which is fitted
        to steps of all sizes and may be wrong for those of the present load."""
        self._idle_seconds = DecayingRatio()
        """Time without a step that a missing row has caused, per row."""
        self._sequences: dict[int, _SequenceState] = {}
        self._acceptance = AcceptanceEstimate(ENGINE_DECAY)
        self._waits = WaitEstimate(ENGINE_DECAY)
        self._start_pause = 0
        """Most rows of a new sequence before the first look at its guesses."""

    def prepare(self, sequence: Sequence) -> bool:
        """Choose the draft tokens of a decode's next row; return False if it has no row now.

        Without known tokens that are not scheduled, the next row consists of guesses: it continues
        the rows in flight, whose own guesses may be wrong. With async scheduling it is a
        placeholder instead, and `choose_drafts` has the choice when the micro-batch is filled.
        """
        known_end, scheduled_end = sequence.num_tokens, sequence.num_scheduled_tokens
        sequence.draft_token_ids = []
        if self.is_paused and sequence.num_rows_in_flight:
            return False
        if self._async_scheduling:
            return scheduled_end < known_end or self.may_run_ahead(sequence)
        if scheduled_end < known_end:
            sequence.draft_token_ids = self._draft(sequence, known_end, is_continued=False)
            return True
        # All tokens in flight are known or guessed.
        is_guessed = scheduled_end == known_end + len(sequence.guesses)
        if is_guessed and self._may_continue(sequence):
            sequence.draft_token_ids = self._draft(sequence, scheduled_end, is_continued=True)
        return bool(sequence.draft_token_ids)

    def list_due(self, decodes: list[Sequence]) -> set[int]:
        """Return the sequences whose guesses are looked at in the next micro-batch.

        Without async scheduling those that have any. With it those whose pause is over; the others
        have their rows as without speculation, and each call counts one row of them.
        """
        if not self._async_scheduling:
            return {sequence.seq for sequence in decodes if sequence.draft_token_ids}
        due = set()
        for sequence in decodes:
            if not sequence.request.allows_guesses:
                continue
            state = self._state_of(sequence)
            if state.pause.is_over(len(decodes)):
                due.add(sequence.seq)
        return due

    def choose_drafts(self, sequence: Sequence, micro_batch: MicroBatchYield) -> bool:
        """Choose the draft tokens of a due decode; return False if it has no row now.

        With async scheduling a sequence whose last token is being sampled leaves out a row if it
        gains by a window behind that token. Windows are compared with placeholders: the row that
        each of them misses counts, and the row that is left out here as often as a window has
        needed one of late. The guesses are added to the micro-batch already, so that not all
        sequences wait at once.

        Guesses that are not worth their time begin a pause. Meanwhile the text shows whether they
        are right, so that nothing has to be computed in order to learn it.

        Args:
            sequence: the sequence.
            micro_batch: yield of the micro-batch, to which the guesses are added.
        """
        if not self._async_scheduling:
            return True  # `prepare` has chosen them.
        sequence.draft_token_ids = []
        state = self._sequences[sequence.seq]
        if state.shadow_token_ids:
            self._learn_from_shadow(state, sequence)
        acceptance = self._acceptance_of(state)
        is_known = sequence.num_scheduled_tokens < sequence.num_tokens
        if not (is_known or self._may_continue(sequence)):
            return True
        num_absences = 1.0
        if not is_known:
            waits = self._waits.waits_per_window(INITIAL_WAITS)
            num_absences += state.waits.waits_per_window(waits)
        most = self._config.num_speculative_tokens
        if not micro_batch.count_useful(most, acceptance, num_absences=num_absences)[0]:
            if sequence.num_output_tokens:
                # The first token of a text says little about the others.
                self._pause(state, sequence, micro_batch.num_rows)
            return True
        state.pause.on_used()
        self._start_pause //= 2
        draft_token_ids = self._draft(sequence, sequence.num_tokens, is_continued=not is_known)
        if is_known:
            sequence.draft_token_ids = draft_token_ids
            return True
        # The first one is the guess of the token that is being sampled.
        num_guesses = len(draft_token_ids) - 1
        if not micro_batch.add(num_guesses, acceptance, num_absences=num_absences):
            return True
        if state.has_waited:
            self._count_wait(state)  # There was no window behind the last one.
        state.has_waited = True
        return False

    def _count_wait(self, state: _SequenceState) -> None:
        """Count the row that a sequence has left out."""
        state.has_waited = False
        state.waits.on_wait()
        self._waits.on_wait()

    def _learn_from_shadow(self, state: _SequenceState, sequence: Sequence) -> None:
        """Compare guesses that no step has computed with the text."""
        num_guesses = len(state.shadow_token_ids)
        num_verified, num_right = state.pop_shadow(sequence.token_ids)
        self._learn(state, num_verified, num_right)
        for estimate in (state.waits, self._waits):
            if num_right < num_guesses:
                estimate.on_wait()  # Another window would hardly have followed.
            estimate.on_window()

    def _pause(self, state: _SequenceState, sequence: Sequence, num_rows: int) -> None:
        """Begin a pause of a sequence, and note what it would guess now."""
        state.pause.on_unused(num_rows)
        self._start_pause = min(LONGEST_START_PAUSE, 2 * self._start_pause or 1)
        state.shadow_start = sequence.num_tokens
        state.shadow_token_ids = self._draft(sequence, sequence.num_tokens, is_continued=False)

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
        # its sequence misses a row. A sequence alone misses nothing, but the device is idle then.
        num_missed = idle_seconds = 0.0
        if self._async_scheduling:
            alone = 1 / max(1, num_decodes)
            num_missed, idle_seconds = 1 - alone, alone * self._idle_seconds.value(0.0)
        seconds = self._guess_cost.seconds
        if not self._curve_fit.is_fitted:
            seconds = idle_seconds = 0.0  # The unit of the curve is not known.
        sizes = num_rows, num_prefill_tokens
        costs = seconds, num_missed, idle_seconds
        return MicroBatchYield(self._curve, *sizes, *costs, num_context)

    @property
    def _curve(self) -> StepTimeCurve:
        """Step time without guesses at the present load."""
        return self._curve_fit.curve.scaled(self._scale.value(1.0, 1.0))

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Learn from a step: its work and its interval, above 0."""
        if not self._curve_fit.is_fitted:
            return
        if not work.prefill_chunks:
            curve, num_context = self._curve_fit.curve, work.num_decode_context_tokens
            expected = curve.seconds(work.num_tokens, num_context=num_context)
            self._scale.forget(SCALE_DECAY)
            self._scale.add(min(seconds / expected, LONGEST_STEP), 1)
        self._guess_cost.observe_step(work, seconds, self._curve)

    def observe_idle(self, seconds: float) -> None:
        """Learn from a step that began late, because none could be scheduled before its result."""
        self._idle_seconds.forget(ENGINE_DECAY)
        self._idle_seconds.add(seconds, 1)

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
        if count:
            if state.has_waited:
                self._count_wait(state)
            state.waits.on_window()
            self._waits.on_window()
        elif not sequence.guesses and not self._async_scheduling:
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

    def _acceptance_of(self, state: _SequenceState) -> float:
        return state.acceptance.share(self._acceptance.share(INITIAL_ACCEPTANCE))

    def _forget(self, state: _SequenceState) -> None:
        """Lower the weight of earlier windows, so that guesses are tried again later."""
        state.acceptance.forget(SEQUENCE_UNUSED_DECAY)
        self._acceptance.forget(ENGINE_UNUSED_DECAY)

    def on_verified(self, seq: int, num_guesses: int, num_right: int) -> None:
        """Learn from a window that began rightly."""
        state = self._sequences[seq]
        self._learn(state, num_guesses, num_right)
        state.num_accepted += num_right
        state.num_rejected += num_guesses - num_right

    def _learn(self, state: _SequenceState, num_guesses: int, num_right: int) -> None:
        """Count the guesses up to the first wrong one, of which `num_right` are right."""
        self._acceptance.on_verified(num_guesses, num_right)
        state.acceptance.on_verified(num_guesses, num_right)

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
        if num_tokens < 1 or not sequence.request.allows_guesses:
            return []
        drafter = self._state_of(sequence).drafter
        return drafter.draft(sequence.token_ids, sequence.guesses, num_tokens)

    def _state_of(self, sequence: Sequence) -> _SequenceState:
        """Return the state of a sequence, which may be new."""
        state = self._sequences.get(sequence.seq)
        if state is None:
            # Sequences that begin together look at different rows.
            pause = sequence.seq % (self._start_pause + 1)
            state = _SequenceState(self._create_drafter(self._config), pause)
            self._sequences[sequence.seq] = state
        return state
