"""The driver's choice of the blocks that are stored, over simulated KV movers.

The contents of blocks are known by their tokens: every block that is on disk under a key has the
content of that key, whatever is evicted, overwritten or lost meanwhile.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from gllm.messages.kv_disk import (
    CopyKvToDisk,
    DiscardKvOnDisk,
    KvDiskCommand,
    KvDiskCopied,
    KvDiskFailed,
    KvDiskLost,
    KvDiskOpened,
    KvDiskRecords,
    KvDiskReport,
    KvDiskWritten,
    WriteKvToDisk,
)
from gllm.runtime.driver.driver_kv_disk import OPEN_SECONDS, DriverKvDisk
from gllm.scheduler.block_pool import chain_hashes, root_hash
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.disk_index import DiskBlock
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.sequence import SchedulerRequest, Sequence
from gllm.scheduler.step_cost import StepCostCoefficients

SIZE = 4
"""Tokens per block."""
SECRET = b"s" * 32


class DiskMachine:
    """KV mover of one machine, with the contents of its blocks in memory and on disk."""

    def __init__(self, memory: dict[int, str], capacity: int) -> None:
        self.memory, self.capacity = memory, capacity
        self.disk: dict[bytes, tuple[DiskBlock, str]] = {}
        self.commands: list[KvDiskCommand] = []
        self.copy: tuple[int, list[str]] = (0, [])
        self.fails_to_write = False

    def open(self) -> Iterator[KvDiskReport]:
        blocks = [block for block, _ in self.disk.values()]
        yield KvDiskRecords(blocks)
        yield KvDiskOpened(SECRET, self.capacity, 3)

    def execute(self) -> KvDiskReport | None:
        """Execute the oldest command; return the report."""
        match self.commands.pop(0):
            case CopyKvToDisk(number, block_ids):
                self.copy = number, [self.memory[block] for block in block_ids]
                return KvDiskCopied(number)
            case WriteKvToDisk(number, indices, blocks, evicted):
                for key in evicted:
                    self.disk.pop(key, None)
                written = []
                assert number == self.copy[0]
                for index, block in zip(indices, blocks, strict=True):
                    if len(self.disk) < self.capacity and not self.fails_to_write:
                        self.disk[block.key] = block, self.copy[1][index]
                        written.append(block.key)
                return KvDiskWritten(number, written, self.capacity)
            case DiscardKvOnDisk(keys):
                for key in keys:
                    self.disk.pop(key, None)
        return None


class DiskRig:
    """A KV cache and the driver's disk tier over machines."""

    def __init__(self, num_machines: int = 1, num_blocks: int = 8, capacity: int = 50) -> None:
        config = SchedulerConfig(block_size=SIZE).resolve(
            max_model_len=SIZE * num_blocks, num_blocks=num_blocks, stages=1
        )
        self.cache = KVCacheManager(config)
        self.memory: dict[int, str] = {}
        self.machines = [DiskMachine(self.memory, capacity) for _ in range(num_machines)]
        self.disk = DriverKvDisk(self.cache, SIZE, num_machines, self._send)
        self.now, self.num_seqs = 0.0, 0

    def _send(self, command: KvDiskCommand) -> None:
        for machine in self.machines:
            machine.commands.append(command)

    def open(self) -> None:
        for number, machine in enumerate(self.machines):
            for report in machine.open():
                self.disk.on_report(number, report)

    def compute(self, tokens: list[int]) -> Sequence:
        """Compute a prompt and publish its blocks; its sequence has ended."""
        self.num_seqs += 1
        request = SchedulerRequest(self.num_seqs, tokens, 1)
        sequence = Sequence(self.num_seqs, request, request.initial_token_ids(0), len(tokens))
        assert self.cache.admit(sequence)
        self.cache.allocate(sequence, len(tokens) - sequence.num_scheduled_tokens)
        for index, block in enumerate(sequence.block_ids):
            if index >= sequence.num_published_blocks:
                self.memory[block] = content_of(tokens, index)
        sequence.num_computed_tokens = len(tokens)
        self.cache.publish(sequence)
        self.cache.free(sequence)
        return sequence

    def step(self, machine: int) -> bool:
        """Let a machine execute a command; return False if it has none."""
        self.now += 1.0
        self.disk.update(self.now)
        if not self.machines[machine].commands:
            return False
        if (report := self.machines[machine].execute()) is not None:
            self.disk.on_report(machine, report)
        return True

    def settle(self) -> None:
        """Run all machines until nothing is left to do."""
        num_steps = 1
        while num_steps:
            num_steps = sum(self.step(machine) for machine in range(len(self.machines)))

    def find(self, tokens: list[int]) -> int:
        """Return how many leading blocks of a prompt are in memory or on disk; check them."""
        num_full = len(tokens) // SIZE
        hashes = chain_hashes(root_hash(""), tokens[: num_full * SIZE], SIZE)
        found = self.disk.find_source(tokens, "", hashes)
        if found is None:
            return 0
        num_memory, source = found
        for index in range(num_memory, len(source.keys)):
            for machine in self.machines:
                assert machine.disk[source.keys[index]][1] == content_of(tokens, index)
        return len(source.keys)

    def totals(self) -> Any:
        totals = self.disk.pop_totals()
        assert totals is not None
        return totals


def content_of(tokens: list[int], index: int) -> str:
    """Return the content of a prompt's block: it depends on all tokens before."""
    return str(tokens[: (index + 1) * SIZE])


def test_complete_blocks_are_stored_and_found_after_a_restart() -> None:
    rig = DiskRig()
    rig.open()
    tokens = list(range(18))
    rig.compute(tokens)
    rig.settle()
    totals = rig.totals()
    assert (totals.num_stored_blocks, totals.num_kept_blocks) == (4, 4)
    assert rig.find(tokens) == 0, "all are in memory"
    again = DiskRig()
    again.machines[0].disk = rig.machines[0].disk
    again.open()
    assert again.find(tokens) == 4
    # A hit of a part is a hit of that part alone.
    assert again.find([*tokens[:9], 77, *tokens[10:]]) == 2
    assert again.find([77, *tokens[1:]]) == 0
    again.compute(tokens)
    again.settle()
    assert again.totals().num_stored_blocks == 0, "they are on disk already"


def test_a_block_that_leaves_memory_before_it_is_written_is_not_stored() -> None:
    """Its number is that of another block by then: a hash must not stay on an evicted block."""
    rig = DiskRig(num_blocks=4)
    rig.open()
    old, new = list(range(12)), list(range(100, 112))
    rig.compute(old)
    rig.disk.update(1.0)
    (copy,) = rig.machines[0].commands
    assert isinstance(copy, CopyKvToDisk)
    # All blocks but one of the old prompt are overwritten before the mover copies them.
    rig.compute(new)
    rig.settle()
    assert rig.find(new) == 0, "all are in memory"
    assert rig.find(old) <= 1
    for block, content in rig.machines[0].disk.values():
        assert block.key in rig.disk._index
        assert content in {content_of(new, index) for index in range(3)} | {content_of(old, 0)}
    assert rig.totals().num_dropped_blocks >= 2


def test_a_block_counts_once_all_machines_have_it() -> None:
    rig = DiskRig(num_machines=2)
    rig.open()
    rig.machines[1].fails_to_write = True
    rig.compute(list(range(13)))
    rig.settle()
    assert rig.machines[0].disk == {}, "what one machine lacks is discarded by the other"
    rig.machines[1].fails_to_write = False
    rig.compute(list(range(50, 63)))
    rig.settle()
    assert len(rig.machines[0].disk) == len(rig.machines[1].disk) == 3
    # One of them loses a block, as by a flipped bit.
    key = next(iter(rig.machines[1].disk))
    del rig.machines[1].disk[key]
    rig.disk.on_report(1, KvDiskLost([key]))
    rig.settle()
    assert key not in rig.machines[0].disk
    assert rig.totals().num_kept_blocks == 2


def test_after_a_restart_blocks_that_one_machine_lacks_are_discarded() -> None:
    rig = DiskRig(num_machines=2)
    rig.open()
    tokens = list(range(17))
    rig.compute(tokens)
    rig.settle()
    again = DiskRig(num_machines=2)
    again.machines[0].disk = dict(rig.machines[0].disk)
    again.machines[1].disk = dict(list(rig.machines[1].disk.items())[:3])
    assert again.find(tokens) == 0
    for report in again.machines[0].open():
        again.disk.on_report(0, report)
    assert again.find(tokens) == 0, "the other machine has not answered"
    for report in again.machines[1].open():
        again.disk.on_report(1, report)
    again.settle()
    assert again.find(tokens) == 3
    assert len(again.machines[0].disk) == 3


def test_invalid_blocks_are_removed_even_while_they_are_written() -> None:
    rig = DiskRig()
    rig.open()
    sequence = rig.compute(list(range(12)))
    rig.step(0)
    assert isinstance(rig.machines[0].commands[0], WriteKvToDisk)
    rig.cache.unpublish(sequence)
    rig.disk.on_invalid(sequence)
    rig.settle()
    assert rig.machines[0].disk == {}
    assert not rig.disk.has_all(sequence.get_disk_keys(1, SIZE, SECRET))


@pytest.mark.parametrize("num_commands", [0, 1, 2])
def test_blocks_are_not_stored_if_a_sequence_with_the_same_tokens_is_invalid(
    num_commands: int,
) -> None:
    """Its own blocks may not be those that are published."""
    rig = DiskRig()
    rig.open()
    sequence = rig.compute(list(range(12)))
    if num_commands:
        rig.disk.update(1.0)
    for _ in range(num_commands - 1):
        rig.step(0)
    rig.disk.on_invalid(sequence)
    rig.settle()
    assert rig.machines[0].disk == {}


def test_a_full_disk_evicts_and_a_smaller_one_too() -> None:
    rig = DiskRig(num_blocks=30, capacity=4)
    rig.disk.set_step_cost(StepCostCoefficients(token=1.0, pair=0.1))
    rig.open()
    for first in range(0, 500, 100):
        rig.compute(list(range(first, first + 13)))
        rig.settle()
    assert len(rig.machines[0].disk) == 4
    rig.machines[0].capacity = 2
    rig.compute(list(range(900, 913)))
    rig.settle()
    rig.compute(list(range(950, 963)))
    rig.settle()
    assert len(rig.machines[0].disk) == 2
    totals = rig.totals()
    assert totals.num_kept_blocks == 2
    assert totals.num_stored_blocks - totals.num_evicted_blocks == 2


def test_a_disk_without_space_stores_nothing_more() -> None:
    rig = DiskRig()
    rig.open()
    rig.machines[0].capacity = 0
    rig.compute(list(range(12)))
    rig.settle()
    assert rig.machines[0].disk == {}
    rig.compute(list(range(50, 62)))
    rig.settle()
    assert not rig.disk.is_active


def test_nothing_waits_for_a_mover_that_has_gone() -> None:
    rig = DiskRig()
    rig.open()
    tokens = list(range(12))
    rig.compute(tokens)
    rig.step(0)
    rig.disk.on_gone(0)
    rig.machines[0].commands.clear()
    assert not rig.disk.is_ready
    assert rig.find(tokens) == 0
    rig.compute([9] * 12)
    assert not rig.disk.is_active
    rig.open()
    rig.compute(list(range(40, 52)))
    rig.settle()
    assert len(rig.machines[0].disk) == 3


def test_the_first_step_waits_for_the_files_but_not_forever() -> None:
    for report in (KvDiskFailed(), KvDiskOpened(SECRET, 4, 4)):
        rig = DiskRig()
        assert rig.disk.is_opening(0.0)
        assert rig.disk.is_active
        rig.disk.on_report(0, report)
        assert not rig.disk.is_opening(0.1)
    rig = DiskRig()
    assert rig.disk.is_opening(5.0)
    assert not rig.disk.is_opening(5.0 + OPEN_SECONDS)
    assert not rig.disk.is_active


def test_prompts_of_another_salt_have_other_keys() -> None:
    rig = DiskRig()
    rig.open()
    tokens = list(range(9))
    rig.compute(tokens)
    rig.settle()
    rig.cache.block_pool.reset_prefix_cache()
    hashes = chain_hashes(root_hash(""), tokens[:8], SIZE)
    assert rig.disk.find_source(tokens, "", hashes) is not None
    assert rig.disk.find_source(tokens, "other", hashes) is None


@pytest.mark.parametrize("num_machines", [1, 2])
def test_random_operations_never_store_a_wrong_block(num_machines: int) -> None:
    choice = random.Random(num_machines)
    rig, num_found = DiskRig(num_machines, num_blocks=7, capacity=9), 0
    rig.open()
    for _ in range(8000):
        prompt = [choice.randrange(3)] * 4 + [choice.randrange(2)] * 4 + [choice.randrange(3)] * 9
        machine = choice.randrange(num_machines)
        match choice.randrange(12):
            case 0 | 1 | 2:
                rig.compute(prompt[: choice.choice([6, 12, 17])])
            case 3:
                rig.cache.block_pool.reset_prefix_cache()
            case 4 if choice.random() < 0.1:
                rig.disk.on_gone(machine)
                rig.machines[machine].commands.clear()
                for report in rig.machines[machine].open():
                    rig.disk.on_report(machine, report)
            case 5 if choice.random() < 0.2 and rig.machines[machine].disk:
                key = choice.choice(list(rig.machines[machine].disk))
                del rig.machines[machine].disk[key]
                rig.disk.on_report(machine, KvDiskLost([key]))
            case 6:
                rig.machines[machine].fails_to_write = choice.random() < 0.2
            case 7 if not any(each.commands for each in rig.machines):
                # Not while blocks are discarded: a load of them would fail.
                num_found += rig.find(prompt) > 0
            case _:
                rig.step(machine)
        for each in rig.machines:
            assert len(each.disk) <= each.capacity
    assert num_found > 50
    rig.settle()
    kept = [set(each.disk) for each in rig.machines]
    assert all(keys == set(rig.disk._index.keys) for keys in kept)
