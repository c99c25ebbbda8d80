"""Requests whose grammars are being compiled wait at the driver, not in the pipeline."""

from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import GrammarReady, RegisterSequences, RunStep, StepDone
from gllm.runtime.driver.driver import Driver
from gllm.runtime.driver.plan_record import PlanRecord, read_uncommitted
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, SchedulerStats, StepResult
from gllm.scheduler.scheduler import Scheduler


class Frontend:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.ends: dict[int, str] = {}
        self.stats: list[SchedulerStats] = []

    def send(self, message) -> None:
        if isinstance(message, EngineOutputs):
            self.stats.append(message.stats)
            self.ends.update((end.seq, end.error) for end in message.outcome.finished)

    def send_encoded(self, payload: bytes) -> None:
        raise AssertionError("the frontend is sent messages")


def made() -> tuple[Driver, list, Frontend]:
    config = SchedulerConfig(async_scheduling=False).resolve(1, 20, 100)
    told: list = []
    frontend = Frontend()
    return Driver(Scheduler(config), told.append, [], frontend), told, frontend


def submit(driver: Driver, seq: int, grammar: str = "", n: int = 1, tokens: int = 5) -> None:
    driver.submit(
        SubmitRequest(seq, [1] * tokens, SequenceSamplingParams(grammar=grammar), 10, [], n)
    )
    driver.run_iteration()


def steps(told: list) -> list[set[int]]:
    return [{row.seq for row in one.plan.rows} for one in told if isinstance(one, RunStep)]


def test_others_run_until_the_grammar_is_compiled() -> None:
    driver, told, frontend = made()
    submit(driver, 0, "grammar")
    assert [type(one) for one in told] == [RegisterSequences], "the stage has it to compile"
    submit(driver, 1)
    assert steps(told) == [{1}]
    driver.on_grammar_ready(GrammarReady(0))
    assert driver.scheduler.stats().waiting == 1
    assert frontend.ends == {}


def test_one_that_does_not_compile_ends_with_its_error() -> None:
    driver, told, frontend = made()
    submit(driver, 0, "grammar", n=3)
    driver.on_grammar_ready(GrammarReady(0, "it is odd"))
    driver.run_iteration()
    assert frontend.ends == dict.fromkeys(range(3), "it is odd")
    assert not driver.scheduler.stats().unfinished
    submit(driver, 3)
    released = [one.plan.released_seqs for one in told if isinstance(one, RunStep)]
    assert sorted(released[0]) == [0, 1, 2], "stages forget it"


def test_one_that_is_aborted_meanwhile_never_runs() -> None:
    driver, told, frontend = made()
    submit(driver, 0, "grammar", n=2)
    driver.abort(AbortSequences([0, 1]))
    driver.on_grammar_ready(GrammarReady(0))
    submit(driver, 2)
    assert steps(told) == [{2}]
    assert [sorted(one.plan.released_seqs) for one in told if isinstance(one, RunStep)] == [[0, 1]]
    assert frontend.ends == {}


def test_one_that_can_never_run_is_not_compiled() -> None:
    driver, told, frontend = made()
    submit(driver, 0, "grammar", tokens=100)
    assert told == []
    assert "at most 100" in frontend.ends[0]


def test_statistics_follow_each_turn_that_changed_them() -> None:
    driver, _, frontend = made()
    submit(driver, 0, "grammar", n=3)
    assert [stats.waiting for stats in frontend.stats] == [3], "held, but waiting all the same"
    submit(driver, 3)
    assert (frontend.stats[-1].waiting, frontend.stats[-1].running) == (3, 1)
    assert (frontend.stats[-1].in_flight, len(frontend.stats)) == (1, 2), "before any commit"
    driver.run_iteration()
    assert len(frontend.stats) == 2, "nothing has changed"
    driver.commit(StepDone(StepResult(0, [SampledToken(3, 0, 7)])))
    driver.run_iteration()
    assert len(frontend.stats) == 3, "with the outcome, not beside it"
    driver.abort(AbortSequences([0, 1, 2, 3]))
    driver.run_iteration()
    assert frontend.stats[-1].waiting == 0


def test_a_held_request_keeps_its_place() -> None:
    """Its time of arrival is that of its submission, however long its grammar takes."""
    driver, told, _ = made()
    for seq, grammar in enumerate(["", "grammar", "", "grammar"]):
        age = 9.0 * (seq == 3)
        sampling = SequenceSamplingParams(grammar=grammar)
        driver.submit(SubmitRequest(seq, [1] * 5, sampling, 10, [], age_seconds=age))
    for seq in (1, 3):
        driver.on_grammar_ready(GrammarReady(seq))
    driver.run_iteration()
    assert [row.seq for row in told[-1].plan.rows] == [3, 0, 1, 2]


def test_the_last_stage_registers_outputs_of_held_requests_too() -> None:
    driver, told, _ = made()
    sampling = SequenceSamplingParams(grammar="grammar")
    message = SubmitRequest(
        4, [1] * 5, sampling, 10, [], 2, choices=[0, 3], outputs=[[7, 8], []], age_seconds=1.0
    )
    driver.submit(message)
    assert told == [RegisterSequences(4, 5, [1] * 5, sampling, 2, [0, 3], [[7, 8], []])]
    driver.on_grammar_ready(GrammarReady(4, n=2))
    driver.run_iteration()
    (row,) = told[-1].plan.rows
    assert (row.num_tokens, row.token_ids, row.should_sample) == (7, [7, 8], True)
    driver.commit(StepDone(StepResult(0, [SampledToken(4, 0, 9)])))
    driver.run_iteration()
    assert [row.seq for row in told[-1].plan.rows] == [4, 5]


def test_held_requests_are_recorded_for_the_parent(tmp_path) -> None:
    """The compilation of a grammar may end the worker."""
    with open(tmp_path / "plans", "w+b") as file:
        told: list = []
        config = SchedulerConfig(async_scheduling=False).resolve(1, 20, 100)
        record = PlanRecord(file.fileno(), 2, 8)
        driver = Driver(Scheduler(config), told.append, [], Frontend(), plan_record=record)

        def recorded() -> set[int]:
            return read_uncommitted(file.fileno())

        submit(driver, 0, "grammar", n=2)
        submit(driver, 2, "grammar")
        assert recorded() == {0, 1, 2}
        driver.on_grammar_ready(GrammarReady(0, "it is odd"))
        assert recorded() == {2}
        driver.on_grammar_ready(GrammarReady(2))
        assert recorded() == set(), "it waits for its turn"
        driver.run_iteration()
        assert recorded() == {2}
        submit(driver, 3, "grammar")
        driver.abort(AbortSequences([3]))
        assert recorded() == {2}
        driver.commit(StepDone(StepResult(0, [SampledToken(2, 0, 9)])))
        assert recorded() == set()
        record.close()
