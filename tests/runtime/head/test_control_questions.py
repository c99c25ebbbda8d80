"""What the parent asks of its workers: each answer belongs to its question."""

import asyncio

import pytest

from gllm.engine.interface import EngineUnavailableError, ProfileError
from gllm.messages.codec import AnyMessage
from gllm.messages.lifecycle import CommandDone, ResetPrefixCache
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.messaging.command_runner import CommandRunner
from tests.support.engines.local_workers import local_engine, local_supervisor


@pytest.mark.parametrize("stages", [1, 2])
async def test_an_abandoned_question_keeps_its_answer_to_itself(stages: int) -> None:
    async with local_engine(stages) as (engine, _):
        for _ in range(3):
            abandoned = asyncio.create_task(engine.reset_prefix_cache())
            await asyncio.sleep(0)
            abandoned.cancel()
        with pytest.raises(ProfileError, match="no profile is being recorded"):
            await asyncio.wait_for(engine.stop_profile(), 60)
        abandoned = asyncio.create_task(engine.stop_profile())
        await asyncio.sleep(0)
        abandoned.cancel()
        await asyncio.wait_for(engine.reset_prefix_cache(), 60)


async def test_an_abandoned_question_leaves_nothing_behind() -> None:
    sent: list[tuple[int, AnyMessage]] = []
    sends = {
        receiver: lambda command, receiver=receiver: sent.append((receiver, command))
        for receiver in (1, 2)
    }
    commands: CommandRunner[int] = CommandRunner()
    abandoned = asyncio.create_task(commands.run(ResetPrefixCache, sends))
    await asyncio.sleep(0)
    assert commands.num_running == 1
    commands.on_done(1, CommandDone(0, 1, ""))
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    assert commands.num_running == 0
    asking = asyncio.create_task(commands.run(ResetPrefixCache, {1: sends[1]}))
    await asyncio.sleep(0)
    # The answer of the other worker to the first question.
    commands.on_done(2, CommandDone(0, 2, "too late"))
    commands.on_done(1, CommandDone(1, 1, ""))
    assert await asyncio.wait_for(asking, 60) == {}
    assert commands.num_running == 0
    assert sent == [(1, ResetPrefixCache(0)), (2, ResetPrefixCache(0)), (1, ResetPrefixCache(1))]


async def test_questions_at_the_same_time_get_their_own_answers() -> None:
    async with local_engine(2) as (engine, _):
        asked = [engine.reset_prefix_cache(), engine.stop_profile(), engine.reset_prefix_cache()]
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        assert [isinstance(answer, ProfileError) for answer in answers] == [False, True, False]


async def test_all_questions_end_with_the_engine() -> None:
    async with local_engine(2, max_restarts=0) as (engine, workers):
        asked = [asyncio.create_task(engine.reset_prefix_cache()) for _ in range(3)]
        asked.append(asyncio.create_task(engine.stop_profile()))
        await asyncio.sleep(0)
        for sender in (1, 2):
            workers.kill(sender)
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        assert [type(answer) for answer in answers] == [*[EngineUnavailableError] * 3, ProfileError]
        assert all("was killed" in str(answer) for answer in answers)


async def test_a_message_that_cannot_be_handled_ends_the_wait() -> None:
    async with local_supervisor() as (supervisor, _):

        def fail() -> None:
            raise ZeroDivisionError("of nothing")

        supervisor.client.set_stats_listener(fail)
        stream = supervisor.client.submit([5, 6], SequenceSamplingParams(), 5, [])
        await asyncio.wait_for(stream.wait(), 60)
        end = stream.pop_deltas()[0].end
        assert end is not None
        assert "ZeroDivisionError: of nothing" in end.error
        assert supervisor.state == "dead"
