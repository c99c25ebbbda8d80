"""Who is told what of a request."""

import sys
import time
from collections.abc import Callable

import pytest

from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_stage
from gllm.messages.reports import BubbleReport, StageTimes, StepCostReport
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams, TokenLogprobs
from gllm.messages.steps import GrammarReady, RegisterSequences, RunStep, StepDone
from gllm.runtime.driver.driver import Driver
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepResult, StepTime
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import REFIT_INTERVAL_STEPS, REPORTED_STEP_INTERVAL


class Heard:
    """A stage that keeps what it hears."""

    def __init__(self) -> None:
        self.messages: list[WireMessage] = []

    def send(self, message: WireMessage) -> None:
        self.messages.append(message)

    def send_encoded(self, payload: bytes) -> None:
        self.messages.append(decode_for_stage(payload))


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("on_devices", [False, True])
@pytest.mark.parametrize("repetition", [1.0, 1.5])
def test_a_prompt_goes_to_those_who_need_it(
    stages: int, on_devices: bool, repetition: float
) -> None:
    """To the first stage, and to the last where it samples by it or keeps tokens on a device."""
    heard = [Heard() for _ in range(stages)]
    config = SchedulerConfig().resolve(stages, 64, 128)
    driver = Driver(Scheduler(config), heard[0].send, [*heard[1:]], Heard(), on_devices)
    sampling = SequenceSamplingParams(repetition_penalty=repetition)
    driver.submit(SubmitRequest(5, [1, 2, 3], sampling, 4, []))
    registered = [stage.messages[0] for stage in heard]
    assert all(isinstance(message, RegisterSequences) for message in registered)
    knows = [
        bool(message.prompt) for message in registered if isinstance(message, RegisterSequences)
    ]
    at_last = stages == 1 or on_devices or repetition != 1
    assert knows == [True, *[False] * (stages - 2), *[at_last] * (stages > 1)]
    told = [message.sampling for message in registered if isinstance(message, RegisterSequences)]
    assert told == [*[None] * (stages - 1), sampling]


@pytest.mark.parametrize("stages", [1, 3])
def test_all_stages_that_read_tokens_get_the_prompt(stages: int) -> None:
    heard = [Heard() for _ in range(stages)]
    config = SchedulerConfig().resolve(stages, 64, 128)
    scheduler = Scheduler(config)
    driver = Driver(scheduler, heard[0].send, [*heard[1:]], Heard(), all_stages_need_prompts=True)
    driver.submit(SubmitRequest(5, [1, 2, 3], SequenceSamplingParams(), 4, []))
    for stage in heard:
        message = stage.messages[0]
        assert isinstance(message, RegisterSequences)
        assert message.prompt == [1, 2, 3]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_other_ranks_of_the_first_stage_get_what_its_rank_0_gets(stages: int) -> None:
    """And they get it earlier, because rank 0 prepares a step at once."""
    order: list[str] = []

    class Rank(Heard):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def send(self, message: WireMessage) -> None:
            order.append(f"{self.name} {type(message).__name__}")
            super().send(message)

        def send_encoded(self, payload: bytes) -> None:
            self.send(decode_for_stage(payload))

    first, others, last = Rank("rank 0"), Rank("other ranks"), Heard()
    config = SchedulerConfig().resolve(stages, 64, 128)
    driver = Driver(
        Scheduler(config), first.send, [*[last] * (stages - 1)], Heard(), first_stage_ranks=others
    )
    sampling = SequenceSamplingParams(repetition_penalty=1.5)
    driver.submit(SubmitRequest(5, [1, 2, 3], sampling, 4, []))
    driver.run_iteration()
    assert [type(message) for message in first.messages[:2]] == [RegisterSequences, RunStep]
    assert others.messages == first.messages
    registered = others.messages[0]
    assert isinstance(registered, RegisterSequences)
    assert registered.prompt == [1, 2, 3]
    assert registered.sampling == (sampling if stages == 1 else None)
    for kind in ("RegisterSequences", "RunStep"):
        assert order.index(f"other ranks {kind}") < order.index(f"rank 0 {kind}")
    assert (last.messages[1:] == first.messages[1:]) == (stages > 1)


@pytest.mark.parametrize("stages", [1, 3])
def test_earlier_output_goes_to_the_stage_that_samples(stages: int) -> None:
    heard = [Heard() for _ in range(stages)]
    config = SchedulerConfig().resolve(stages, 64, 128)
    driver = Driver(Scheduler(config), heard[0].send, [*heard[1:]], Heard())
    request = SubmitRequest(
        5, [1, 2, 3], SequenceSamplingParams(), 4, [], 2, choices=[1, 2], outputs=[[7], [8, 9]]
    )
    driver.submit(request)
    *others, last = [stage.messages[0] for stage in heard]
    assert isinstance(last, RegisterSequences)
    assert (last.n, last.choices, last.outputs) == (2, [1, 2], [[7], [8, 9]])
    for message in others:
        assert isinstance(message, RegisterSequences)
        assert (message.n, message.choices, message.outputs) == (2, [], [])


@pytest.mark.parametrize("grammar", ["", "a grammar that is still being compiled"])
def test_stages_forget_choices_that_were_aborted_before_they_began(grammar: str) -> None:
    """They know all choices of a request from its registration on."""
    stage, frontend = Heard(), Heard()
    config = SchedulerConfig().resolve(1, 64, 128)
    driver = Driver(Scheduler(config), stage.send, [], frontend)
    driver.submit(SubmitRequest(5, [1, 2, 3], SequenceSamplingParams(grammar=grammar), 4, [], n=3))
    driver.abort(AbortSequences([7]))
    driver.submit(SubmitRequest(8, [4], SequenceSamplingParams(), 4, []))
    driver.on_grammar_ready(GrammarReady(5))
    driver.run_iteration()
    outputs = [message for message in frontend.messages if isinstance(message, EngineOutputs)]
    assert outputs[-1].stats.unfinished == 3
    released = [one.plan.released_seqs for one in stage.messages if isinstance(one, RunStep)]
    assert released[0] == [7]


def count_calls(function: Callable[[], object]) -> int:
    """Return the number of calls of functions, of C too, that a call makes."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return num_calls


@pytest.mark.parametrize("grammar", ["", "a grammar that is still being compiled"])
def test_waiting_requests_are_aborted_in_linear_time(grammar: str) -> None:
    num_calls = []
    sampling = SequenceSamplingParams(grammar=grammar)
    for num_requests in (100, 400):
        config = SchedulerConfig().resolve(1, 64, 128)
        driver = Driver(Scheduler(config), Heard().send, [], Heard())
        for seq in range(num_requests):
            driver.submit(SubmitRequest(seq, [1, 2], sampling, 4, []))

        def abort(driver: Driver = driver, num_requests: int = num_requests) -> None:
            for seq in range(num_requests):
                driver.abort(AbortSequences([seq]))

        num_calls.append(count_calls(abort))
        assert driver.scheduler.stats().unfinished == 0
    assert num_calls[1] < 5 * num_calls[0]


def test_a_stage_s_times_reach_the_policy_and_the_frontend() -> None:
    heard, stage = Heard(), Heard()
    scheduler = Scheduler(SchedulerConfig().resolve(1, 64, 128))
    observed: list[tuple[int, list[StepTime]]] = []
    scheduler.record_step_times = lambda stage, times: observed.append((stage, times))  # type: ignore[method-assign]
    driver = Driver(scheduler, stage.send, [], heard)
    driver.submit(SubmitRequest(0, [1, 2, 3], SequenceSamplingParams(), 4, []))
    driver.run_iteration()
    now = time.monotonic()
    times = [StepTime(0, now + 1, now + 2)]
    driver.on_stage_times(StageTimes(0, times, now + 3))
    assert observed == [(0, times)]
    (bubbles,) = (message for message in heard.messages if isinstance(message, BubbleReport))
    # At hand for longer than three seconds, and computed for one of them.
    assert bubbles.seconds[0] > 2
    assert bubbles.work_seconds == pytest.approx(bubbles.seconds[0] + 1)


def test_what_rows_tell_beyond_the_end_of_their_sequence_is_dropped() -> None:
    heard, stage = Heard(), Heard()
    driver = Driver(Scheduler(SchedulerConfig().resolve(1, 64, 128)), stage.send, [], heard)
    for seq in (0, 1):
        driver.submit(SubmitRequest(seq, [1, 2, 3], SequenceSamplingParams(logprobs=0), 4, []))
    driver.run_iteration()
    driver.abort(AbortSequences([1]))
    sampled = [SampledToken(seq, 0, 9) for seq in (0, 1)]
    told = [SampleDetails(seq, TokenLogprobs(9, -0.5, 1, [], []), []) for seq in (0, 1)]
    driver.commit(StepDone(StepResult(0, sampled), told))
    driver.run_iteration()
    logprobs = [one.details for one in heard.messages if isinstance(one, EngineOutputs)]
    assert [row.seq for rows in logprobs for row in rows] == [0]


def test_requests_whose_grammars_compile_have_tokens_that_wait() -> None:
    heard, stage = Heard(), Heard()
    driver = Driver(Scheduler(SchedulerConfig().resolve(1, 64, 128)), stage.send, [], heard)
    sampling = SequenceSamplingParams(grammar="a grammar that is still being compiled")
    driver.submit(SubmitRequest(5, [1, 2, 3], sampling, 4, [], n=2, outputs=[[4], []]))
    driver.run_iteration()
    (outputs,) = (message for message in heard.messages if isinstance(message, EngineOutputs))
    assert (outputs.stats.waiting, outputs.stats.waiting_tokens) == (2, 4)


def test_the_frontend_gets_the_fitted_cost_of_steps() -> None:
    heard, stage = Heard(), Heard()
    driver = Driver(Scheduler(SchedulerConfig().resolve(1, 64, 128)), stage.send, [], heard)
    for step in range(REFIT_INTERVAL_STEPS * REPORTED_STEP_INTERVAL):
        driver.submit(SubmitRequest(step, [1, 2, 3], SequenceSamplingParams(), 1, []))
        driver.run_iteration()
        driver.on_stage_times(StageTimes(0, [StepTime(step, 1.0, 1.25)], 2.0))
        driver.commit(StepDone(StepResult(step, [SampledToken(step, 0, 9)]), []))
    reports = [message for message in heard.messages if isinstance(message, StepCostReport)]
    work = StageWork(0, 3, ((0, 3),), 0, 0, 1)
    assert [report.coefficients.predict_seconds(work) for report in reports] == [
        pytest.approx(0.25, rel=0.1)
    ]


def test_a_predicted_length_gets_to_the_scheduler() -> None:
    requests = []

    class Recording(Scheduler):
        def add(self, request: SchedulerRequest, now: float) -> None:
            requests.append(request)
            super().add(request, now)

    config = SchedulerConfig().resolve(1, 64, 128)
    driver = Driver(Recording(config), Heard().send, [], Heard(), False)
    sampling = SequenceSamplingParams()
    driver.submit(SubmitRequest(5, [1], sampling, 4, [], predicted_output_tokens=3))
    assert [request.predicted_output_tokens for request in requests] == [3]
