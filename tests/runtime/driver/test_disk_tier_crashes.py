"""Driver and files of the disk tier over simulated disks: crashes, damage and restarts.

Whatever happens to processes and disks, a load returns the blocks of its tokens or none. The KV
movers are simulated: they execute the driver's commands on real files, at any time.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256

import pytest

from gllm.messages.kv_disk import (
    CopyKvToDisk,
    DiscardKvOnDisk,
    KvDiskCommand,
    KvDiskCopied,
    KvDiskLost,
    KvDiskOpened,
    KvDiskRecords,
    KvDiskReport,
    KvDiskWritten,
    WriteKvToDisk,
)
from gllm.scheduler.block_pool import chain_hashes, root_hash
from gllm.scheduler.sequence import Sequence
from gllm.transport.kv.record_file import PAGE_BYTES, RecordFile, count_record_bytes
from tests.runtime.driver.test_driver_kv_disk import SECRET, SIZE, DiskRig, content_of
from tests.support.engines.simulated_disk import SimulatedDisk

BLOCK_BYTES = 700
"""The header and the block are in different sectors."""
CAPACITY = 9
NUM_BLOCKS = 7
INVALID = "logits that are not finite"


def to_bytes(content: str) -> bytes:
    """Return the bytes of a block with a content."""
    return random.Random(content).randbytes(BLOCK_BYTES)


class RecordMachine:
    """KV mover of one machine, with a file on a simulated disk."""

    def __init__(self, memory: dict[int, str], disk: SimulatedDisk) -> None:
        self.memory, self.disk = memory, disk
        self.commands: list[KvDiskCommand] = []
        self._copy: tuple[int, list[bytes]] = (0, [])
        self.file = self._open_file()

    def _open_file(self) -> RecordFile:
        identity = sha256(b"model").digest()
        size = PAGE_BYTES + CAPACITY * count_record_bytes(BLOCK_BYTES)
        return RecordFile(self.disk, identity, BLOCK_BYTES, size)

    def open(self) -> Iterator[KvDiskReport]:
        """Open the file as a new process does; yield the reports."""
        self.commands.clear()
        self.disk.max_bytes = SimulatedDisk().max_bytes
        self.file = self._open_file()
        yield KvDiskRecords(self.file.records)
        yield KvDiskOpened(SECRET, self.file.capacity, 3)

    def execute(self) -> KvDiskReport | None:
        """Execute the oldest command as KvDiskTier does; return the report."""
        match self.commands.pop(0):
            case CopyKvToDisk(number, block_ids):
                self._copy = number, [to_bytes(self.memory[block]) for block in block_ids]
                return KvDiskCopied(number)
            case WriteKvToDisk(number, indices, blocks, evicted):
                self.file.evict(evicted)
                written = []
                for index, block in zip(indices, blocks, strict=True):
                    try:
                        is_written = self.file.write(block, self._copy[1][index])
                    except OSError:
                        is_written = False
                    if is_written:
                        written.append(block.key)
                    else:
                        self.file.evict([block.key])
                return KvDiskWritten(number, written, self.file.capacity)
            case DiscardKvOnDisk(keys):
                with suppress(OSError):
                    self.file.discard(keys)
        return None


class CrashingRig(DiskRig):
    """A driver's disk tier over machines with files."""

    def __init__(self, disks: list[SimulatedDisk], invalid: set[bytes]) -> None:
        super().__init__(len(disks), NUM_BLOCKS)
        self.record_machines = [RecordMachine(self.memory, disk) for disk in disks]
        self.machines = self.record_machines  # type: ignore[assignment]
        self.invalid = invalid
        """Keys that may have an invalid content on disk."""

    def compute_invalid(self, tokens: list[int]) -> Sequence:
        """Compute a prompt whose new blocks have an invalid content."""
        before = dict(self.memory)
        sequence = self.compute(tokens)
        keys = sequence.get_disk_keys(len(tokens) // SIZE, SIZE, SECRET)
        for block, content in self.memory.items():
            if before.get(block) != content:
                self.memory[block] = INVALID + content
        self.invalid |= set(keys)
        return sequence

    def load(self, tokens: list[int]) -> str:
        """Load a prompt's blocks as KvDiskTier does; return what has come of it."""
        num_full = len(tokens) // SIZE
        hashes = chain_hashes(root_hash(""), tokens[: num_full * SIZE], SIZE)
        found = self.disk.find_source(tokens, "", hashes)
        if found is None:
            return "nothing on disk"
        num_memory, source = found
        is_complete = True
        for number, machine in enumerate(self.record_machines):
            lost = []
            for index, key in enumerate(source.keys[num_memory:], start=num_memory):
                block = machine.file.read(key)
                if block is None:
                    lost.append(key)
                    continue
                content = content_of(tokens, index)
                assert block == to_bytes(content) or (
                    key in self.invalid and block == to_bytes(INVALID + content)
                )
            if lost:
                is_complete = False
                self.disk.on_report(number, KvDiskLost(lost))
        return "loaded" if is_complete else "lost"


def run(num_machines: int, num_operations: int, seed: int) -> Counter[str]:
    """Execute random operations; return how often each thing has happened."""
    choice, counts = random.Random(seed), Counter[str]()
    disks = [SimulatedDisk() for _ in range(num_machines)]
    rig = CrashingRig(disks, set())
    rig.open()
    for _ in range(num_operations):
        prompt = [choice.randrange(3)] * 4 + [choice.randrange(2)] * 4 + [choice.randrange(3)] * 9
        prompt = prompt[: choice.choice([6, 12, 17])]
        machine = rig.record_machines[choice.randrange(num_machines)]
        number = rig.record_machines.index(machine)
        name = choice.choices(list(SHARES), list(SHARES.values()))[0]
        match name:
            case "compute":
                rig.compute(prompt)
            case "load":
                counts[rig.load(prompt)] += 1
            case "step":
                rig.step(number)
            case "reset":
                rig.cache.block_pool.reset_prefix_cache()
            case "invalid":
                sequence = rig.compute_invalid(prompt)
                for _ in range(choice.randrange(6)):
                    rig.step(number)
                rig.cache.unpublish(sequence)
                rig.disk.on_invalid(sequence)
                rig.cache.block_pool.reset_prefix_cache()
                if choice.random() < 0.8:
                    rig.settle()
                    rig.invalid -= set(sequence.get_disk_keys(len(prompt) // SIZE, SIZE, SECRET))
            case "mover dies":
                rig.disk.on_gone(number)
                for report in machine.open():
                    rig.disk.on_report(number, report)
            case "driver dies":
                rig = CrashingRig([each.disk for each in rig.record_machines], rig.invalid)
                rig.open()
            case "power fails":
                states = [each.disk.crash_states(choice, 1)[0] for each in rig.record_machines]
                rig = CrashingRig(states, rig.invalid)
                rig.open()
            case "sync":
                machine.disk.sync()
            case "flip":
                if choice.random() < 0.1:
                    machine.disk.flip(choice.randrange(64))
                if (size := len(machine.disk.data)) > PAGE_BYTES:
                    machine.disk.flip(choice.randrange(PAGE_BYTES, size))
            case "truncate":
                machine.disk.truncate(choice.randrange(PAGE_BYTES, len(machine.disk.data) + 1))
            case "full":
                machine.disk.max_bytes = len(machine.disk.data) + choice.choice([0, 100])
            case "space":
                machine.disk.max_bytes = SimulatedDisk().max_bytes
        counts[name] += 1
    rig.settle()
    for key in rig.disk._index.keys:
        assert all(key in each.file for each in rig.record_machines)
    return counts


SHARES = {
    "compute": 20,
    "load": 15,
    "step": 45,
    "reset": 6,
    "invalid": 1,
    "mover dies": 1,
    "driver dies": 1,
    "power fails": 1,
    "sync": 5,
    "flip": 1,
    "truncate": 0.3,
    "full": 0.3,
    "space": 0.6,
}
"""Operations by name, with their shares."""


@pytest.mark.parametrize(
    ("num_machines", "num_operations"),
    [
        (1, 1500),
        (2, 1500),
        *(pytest.param(number, 33_400, marks=pytest.mark.full) for number in (1, 2, 3)),
    ],
)
def test_no_load_returns_a_wrong_block(num_machines: int, num_operations: int) -> None:
    counts = run(num_machines, num_operations, seed=num_machines)
    assert counts["loaded"] > num_operations / 200, counts
    assert counts["lost"]
    assert all(counts[name] for name in SHARES)
