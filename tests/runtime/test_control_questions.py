"""What the parent asks of its workers: each answer belongs to its question."""

import asyncio

import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import EngineUnavailableError, ProfileError
from tests.support.engines.local_workers import local_engine


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
        assert not engine._supervisor._executor.commands._reports


async def test_questions_at_the_same_time_get_their_own_answers() -> None:
    async with local_engine(2) as (engine, _):
        asked = [engine.reset_prefix_cache(), engine.stop_profile(), engine.reset_prefix_cache()]
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        assert [isinstance(answer, ProfileError) for answer in answers] == [False, True, False]


async def test_all_questions_end_with_the_engine() -> None:
    async with local_engine(2) as (engine, _):
        asked = [asyncio.create_task(engine.reset_prefix_cache()) for _ in range(3)]
        asked.append(asyncio.create_task(engine.stop_profile()))
        await asyncio.sleep(0)
        engine._supervisor._die("the power is out")
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        assert [type(answer) for answer in answers] == [*[EngineUnavailableError] * 3, ProfileError]
        assert all("the power is out" in str(answer) for answer in answers)


async def test_a_message_that_cannot_be_handled_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with local_engine() as (engine, _):

        def fail(message: object) -> None:
            raise ZeroDivisionError("of nothing")

        monkeypatch.setattr(engine._client, "on_report", fail)
        generating = engine.generate([5, 6], SamplingParams(max_tokens=5, ignore_eos=True))
        deltas = await asyncio.wait_for(anext(generating), 60)
        assert "ZeroDivisionError: of nothing" in deltas.error
        assert engine.status().state == "dead"
