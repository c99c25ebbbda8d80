"""A standby worker has the weights of every place that it may take before anybody dies."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gllm.messages.lifecycle import LayersPrepared
from gllm.models.weight_cache import weight_cache
from gllm.recovery.placement import RankWorker, make_placement
from gllm.runtime.head.assignment import NodeAssignment
from tests.support.engines.local_workers import LocalWorkers
from tests.support.nodes.scripted_head import Head, head_of

STANDBY = 9
PROMPT = [5, 9, 3, 7] * 5


async def prepare_standby(head: Head) -> list[LayersPrepared]:
    """Start a standby worker and let it map weights; return its report for each stage."""
    await head.spawn(STANDBY)
    bounds = [(each.start, each.stop) for each in head.layers]
    placement = make_placement(head.epoch, bounds, [RankWorker(each) for each in head.senders])
    assignment = NodeAssignment(placement, head.config, change=1, standby=STANDBY)
    head.node.prepare(assignment, head.model_folder, head.node.node_name)

    def reports() -> list[LayersPrepared]:
        found = [message for _, _, message in head.messages if isinstance(message, LayersPrepared)]
        senders = {s for _, s, message in head.messages if isinstance(message, LayersPrepared)}
        assert senders <= {STANDBY}, "nobody else prepares anything"
        return found

    await head.until(lambda: len(reports()) == len(head.senders))
    return reports()


async def replace_stage(head: Head, node: LocalWorkers, stage: int) -> None:
    """Lose the worker of a stage, and begin an epoch with the standby worker in its place."""
    sender = head.senders[stage]
    node.kill(sender)
    await head.until(partial(head.exits.__contains__, sender))
    head.hub.forget(sender)
    await head.close_epoch([each for each in head.senders if each != sender])
    head.senders[stage] = STANDBY
    head.assign(cause="it was killed")
    await head.initialize()


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_weights_of_any_stage_are_mapped_before_its_worker_dies(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = LocalWorkers()
    async with head_of(node, 3, weight_cache=str(tmp_path)) as head:
        head.assign()
        await head.initialize()
        expected = await head.generate(PROMPT, 6)
        assert await prepare_standby(head) == [LayersPrepared(1, 0, "", False)] * 3

        def fail(*arguments: Any) -> None:
            raise AssertionError("something is read or mapped after the death")

        monkeypatch.setattr("gllm.runtime.worker.executor.Checkpoint", fail)
        monkeypatch.setattr(weight_cache, "map_part_file", fail)
        await replace_stage(head, node, stage)
        assert await head.generate(PROMPT, 6) == expected
        (instance,) = [w.instance for s, w in node.workers.items() if s == STANDBY]
        assert instance is not None
        assert instance.executor.layers == head.layers[stage]


async def test_weights_that_no_file_has_take_no_memory_in_advance() -> None:
    """They are loaded by the worker that takes the place."""
    node = LocalWorkers()
    async with head_of(node, 2) as head:
        head.assign()
        await head.initialize()
        expected = await head.generate(PROMPT, 6)
        reports = await prepare_standby(head)
        assert all("are missing" in report.cause for report in reports)
        assert not any(report.is_failed for report in reports)
        await replace_stage(head, node, 1)
        assert await head.generate(PROMPT, 6) == expected
