"""Ranks as processes that compute collectives under random delays, some of which are killed.

Run as `python -m tests.support.network.rank_processes`; prints one JSON line per trial. It forks
the ranks, because each of them would take seconds to import torch.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter

import torch

from gllm.kernels.all_reduce import GroupClosedError, RankGroup
from gllm.transport.groups import StageGroups, open_groups
from gllm.transport.region import Region, RegionLayout, create_region

LAYOUT = RegionLayout(max_tokens=128, hidden_size=512, vocab_rows=100)
DONE, CLOSED, WRONG, FAILED = 0, 3, 4, 5
NAMES = {DONE: "done", CLOSED: "closed", WRONG: "wrong", FAILED: "failed", -9: "killed"}
"""Ends of a rank, by exit status."""


def is_right(group: RankGroup, shared: random.Random, number: int) -> bool:
    """Compute one collective, the same on all ranks; return whether its result is right.

    shared: has the same state on all ranks.
    """
    kind, rows = shared.choice(["sum"] * 6 + ["maximum", "gather", "meet", "broadcast"]), 1
    if shared.random() < 0.3:
        rows = shared.randrange(1, 129)
    base = torch.full((group.size, 1), float(number % 4096)) + torch.arange(group.size)[:, None]
    numbers = base + torch.arange(512) % 7
    mine = numbers[group.rank].expand(rows, -1)
    if kind == "sum":
        partial = group.partial(rows, 512) if shared.random() < 0.7 else None
        part = mine if partial is None else partial.copy_(mine)
        total = group.sum(part, None, torch.float32)
        return torch.equal(total, numbers.sum(0).expand(rows, -1))
    if kind == "maximum":
        return torch.equal(group.maximum(mine[:, 0]), base[-1].expand(rows))
    if kind == "meet":
        errors = ["" if shared.random() < 0.8 else f"{rank}" for rank in range(group.size)]
        return group.agree_on_step(number, errors[group.rank]) == next(filter(None, errors), "")
    if kind == "broadcast":
        values = group.broadcast(torch.full((rows,), number) if group.rank == 0 else None, rows)
        return torch.equal(values, torch.full((rows,), number))
    gathered = group.gather(mine[:, :100], [100] * group.size)
    wanted = numbers[:, :100].reshape(1, -1).expand(rows, -1)
    return (
        gathered is None if group.rank else gathered is not None and torch.equal(gathered, wanted)
    )


def run_rank(groups: StageGroups, args: argparse.Namespace, seed: int) -> int:
    """Compute collectives until all are done, one is wrong or the group is closed."""
    torch.set_num_threads(1)
    group = groups.layers
    shared, own = random.Random(seed), random.Random(f"{seed} {group.rank}")
    try:
        for number in range(args.collectives):
            if own.random() < args.delays:
                time.sleep(own.choice([0.0, 1e-5, 1e-4, 1e-3]))
            if not is_right(group, shared, number):
                return WRONG
    except GroupClosedError:
        return CLOSED
    return DONE


def fork_rank(region: Region, rank: int, args: argparse.Namespace, seed: int) -> tuple[int, int]:
    """Start a rank; return its process and a pipe that cancels its groups once it is closed."""
    reader, writer = os.pipe()
    process = os.fork()
    if process:
        os.close(reader)
        return process, writer
    status = FAILED
    try:
        os.close(writer)
        groups = open_groups(region, rank, args.ranks, LAYOUT)

        def cancel_at_end() -> None:
            os.read(reader, 1)
            groups.head.cancel()

        threading.Thread(target=cancel_at_end, daemon=True).start()
        status = run_rank(groups, args, seed)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def run_trial(args: argparse.Namespace, seed: int) -> dict[str, int]:
    """Run all ranks once; return how many of them ended in which way."""
    own = random.Random(f"trial {seed}")
    region = create_region("test-ranks")
    ranks = [fork_rank(region, rank, args, seed) for rank in range(args.ranks)]
    if args.kill:
        time.sleep(own.uniform(0, args.kill))
        victim = own.randrange(args.ranks)
        os.kill(ranks[victim][0], signal.SIGKILL)
        time.sleep(own.choice([0.0, 0.001, 0.01]))
        # One of the others notices it and cancels the group for all.
        survivor = own.choice([rank for rank in range(args.ranks) if rank != victim])
        with contextlib.suppress(BrokenPipeError):
            os.write(ranks[survivor][1], b"x")
    ends = Counter(_wait(process) for process, _ in ranks)
    for _, writer in ranks:
        os.close(writer)
    region.close()
    return {NAMES.get(status, str(status)): count for status, count in ends.items()}


def _wait(process: int) -> int:
    """Return the exit status of a process; kill it after a minute."""
    end = time.monotonic() + 60
    while True:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return 124
        time.sleep(0.001)


def main() -> None:
    """Run the trials."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--collectives", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delays", type=float, default=0.1, help="share of collectives")
    parser.add_argument("--kill", type=float, default=0.0, help="kill a rank within these seconds")
    args = parser.parse_args()
    for seed in range(args.seed, args.seed + args.trials):
        print(json.dumps(run_trial(args, seed)), flush=True)


if __name__ == "__main__":
    main()
