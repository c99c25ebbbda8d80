"""Policies of experiments/: Vidur's baselines, parts of the throttle, and their entries."""

from pathlib import Path
from random import Random

import pytest

from gllm.commands.simulate import main as simulate
from gllm.observability.step_log import read_step_log
from gllm.options.flags import FlagParser, add_flags
from gllm.plan.search.designs import parse_policies
from gllm.scheduler.config import POLICY_NAMES, SchedulerConfig
from gllm.scheduler.policy import SchedulerLoad, SchedulingPolicy
from gllm.scheduler.policy_entry import BASELINE_ENTRIES, POLICY_METHODS, load_policy
from gllm.scheduler.policy_registry import create_policy
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.replay import replay_calls
from tests.scheduler.test_policy import load
from tests.scheduler.test_traps import prompt
from tests.scheduler.test_whole_prompts import decodes, pipeline, prefills, run_all

ORCA = BASELINE_ENTRIES["orca+"]


@pytest.mark.parametrize(
    ("name", "given_load", "tokens"),
    [
        ("throttle-no-wt", load(waiting=800, decoding=9, free=0.24), 410),
        ("throttle-no-wt", load(waiting=800, decoding=9, free=0.05), 0),
        ("throttle-no-wt", load(waiting=800), 2048),
        ("throttle-no-ut", load(waiting=8000, decoding=9, free=0.1), 1000),
        ("throttle-no-ut", load(waiting=8000, decoding=9, free=0.05), 0),
        ("orca+", load(waiting=8000, decoding=9, free=0.01), 4096),
        ("fastertransformer", load(waiting=8000, decoding=9, free=0.01), 4096),
        # Ten iterations of four stages pass between two prompts, unless one is unfinished.
        ("lightllm", load(waiting=8000), 4096),
        ("lightllm", load(waiting=8000, decoding=9, plans=39), 0),
        ("lightllm", load(waiting=8000, decoding=9, plans=40), 4096),
        ("lightllm", load(waiting=8000, begun=9, decoding=9, plans=39), 4096),
    ],
)
def test_prefill_budget(name: str, given_load: SchedulerLoad, tokens: int) -> None:
    config = SchedulerConfig(policy=name).resolve(4, 1000, 1000)
    assert create_policy(config).prefill_budget(given_load) == tokens


def test_an_entry_runs_in_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "steps.jsonl"
    argv = ["--requests", "8", "--policy", ORCA, "--step-log", str(log)]
    assert simulate(argv) == 0
    assert ORCA in capsys.readouterr().out
    agreement = replay_calls(list(read_step_log(log)))
    assert agreement.num_equal == agreement.num_plans > 0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("experiments.policies.orca:OrcaPolicy", "cannot be imported .* or add this folder to"),
        ("experiments.policies.orca_plus:Orca", "has no class Orca: choose from OrcaPlusPolicy"),
        (
            "experiments.base:ExperimentOptions",
            "lacks fill, .*: derive it from .*TokenBudgetPolicy",
        ),
    ],
)
def test_an_entry_that_is_no_policy_is_an_error_with_its_fix(
    entry: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, _ = entry.partition(":")
    with pytest.raises(ValueError, match=f"--policy {entry}: .*{module} {message}"):
        SchedulerConfig(policy=entry).resolve(1, 100, 100)
    with pytest.raises(ValueError, match=f"--policies {entry}: .*{module} {message}"):
        parse_policies(entry)
    assert simulate(["--requests", "2", "--policy", entry]) == 2
    assert f"--policy {entry}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["orca", "a:b:c", ":Policy", "module:", "my-module:Policy"])
def test_a_text_that_is_neither_a_name_nor_an_entry_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="policy"):
        SchedulerConfig(policy=name)
    with pytest.raises(ValueError, match="--policies"):
        parse_policies(f"vllm,{name}")


@pytest.mark.parametrize("policy", [ORCA, "orca+"])
def test_flags_of_servers_offer_registered_policies_alone(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = FlagParser(prog="gllm serve")
    add_flags(parser, SchedulerConfig)
    with pytest.raises(SystemExit):
        parser.parse_args(["--policy", policy])
    error = capsys.readouterr().err
    assert "argument --policy: invalid choice" in error
    assert all(name in error for name in POLICY_NAMES)
    assert "module:Class" not in parser.format_help()


@pytest.mark.parametrize("name", BASELINE_ENTRIES)
def test_short_names_of_logs_and_pages_are_entries(name: str) -> None:
    config = SchedulerConfig(policy=name)
    assert config.policy == BASELINE_ENTRIES[name]
    assert type(create_policy(config.resolve(1, 100, 100))) is load_policy(config.policy)


def test_a_step_log_with_a_short_name_is_read(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    assert simulate(["--requests", "4", "--policy", ORCA, "--step-log", str(log)]) == 0
    log.write_text(log.read_text().replace(ORCA, "orca+"))
    start = next(iter(read_step_log(log)))
    assert start.scheduler.policy == ORCA  # type: ignore[union-attr]
    agreement = replay_calls(list(read_step_log(log)))
    assert agreement.num_equal == agreement.num_plans > 0


def test_entries_of_a_search_may_have_tokens() -> None:
    assert parse_policies(f"{ORCA}:64, {ORCA}") == ((ORCA, 64), (ORCA, None))


def test_the_methods_of_an_entry_are_those_of_the_interface() -> None:
    public = {name for name, member in vars(SchedulingPolicy).items() if callable(member)}
    assert {name for name in public if not name.startswith("_")} == set(POLICY_METHODS)


def test_batches_of_fixed_members_have_no_other_admission() -> None:
    config = SchedulerConfig(policy="fastertransformer", kv_admission="greedy")
    with pytest.raises(ValueError, match=r"kv_admission is greedy.*FasterTransformer.*choose auto"):
        create_policy(config.resolve(1, 100, 100))


# orca+.


def test_orca_adds_whole_prompts_to_the_decodes() -> None:
    pipe = pipeline("orca+", max_num_batched_tokens=100)
    for seq, tokens in enumerate((45, 45, 20, 200, 30)):
        pipe.add(SchedulerRequest(seq, prompt(tokens, mark=seq), 4))
    rows = []
    for _ in range(6):
        plan = pipe.schedule()
        assert plan is not None
        rows.append([(row.seq, row.num_tokens) for row in plan.rows])
        pipe.commit()
    assert rows == [
        [(0, 45), (1, 45)],
        [(0, 1), (1, 1), (2, 20)],
        [(0, 1), (1, 1), (2, 1), (3, 97)],
        [(0, 1), (1, 1), (2, 1), (3, 97)],
        [(2, 1), (3, 6), (4, 30)],
        [(3, 1), (4, 1)],
    ]


# lightllm.


def test_lightllm_counts_iterations_of_all_stages() -> None:
    """Two batches decode in turns on two stages, so ten iterations of both are 20 plans."""
    pipe = pipeline("lightllm", stages=2)
    for seq in range(2):
        pipe.add(SchedulerRequest(seq, prompt(10, mark=seq), 100))
        pipe.schedule()
    pipe.add(SchedulerRequest(2, prompt(10, mark=2), 100))
    num_decode_plans = 0
    while True:
        pipe.commit()
        plan = pipe.schedule()
        assert plan is not None
        if prefills(pipe, plan):
            break
        num_decode_plans += 1
    assert num_decode_plans == 20


def test_lightllm_starts_prompts_every_ten_iterations() -> None:
    pipe = pipeline("lightllm")
    starts = {}
    for step in range(60):
        if step % 3 == 0 and len(pipe.requests) < 12:
            pipe.add(SchedulerRequest(len(pipe.requests), prompt(10, mark=step), 100))
        plan = pipe.schedule()
        assert plan is not None
        if started := prefills(pipe, plan):
            assert not decodes(pipe, plan)
            starts[step] = started
        pipe.commit()
    # Ten decodes, then the prompts that have arrived meanwhile.
    assert starts == {0: [0], 11: [1, 2, 3], 22: [4, 5, 6, 7], 33: [8, 9, 10, 11]}


@pytest.mark.parametrize(("num_blocks", "fits"), [(123, True), (122, False)])
def test_lightllm_admits_up_to_the_peak_of_the_cache(num_blocks: int, fits: bool) -> None:
    """Blocks of one token; each decode has one block more for its next token.

    Three prompts of 30 tokens generate 10, 20 and 20 tokens: 90 + 3 * 11 blocks when the first one
    ends, fewer later, and 140 if all had their longest length at once.
    """
    pipe = pipeline("lightllm", num_blocks, 60, block_size=1)
    for seq, tokens in enumerate((10, 20, 20)):
        pipe.add(SchedulerRequest(seq, prompt(30, mark=seq), tokens))
    plan = pipe.schedule()
    assert plan is not None
    assert len(plan.rows) == (3 if fits else 2)
    pipe.commit()
    run_all(pipe)
    assert pipe.scheduler.stats().preemptions == 0


# fastertransformer.


@pytest.mark.parametrize("stages", [1, 3])
def test_batches_start_and_end_together(stages: int) -> None:
    """No sequence joins a batch after its first decode, and a batch decodes as one."""
    rng = Random(stages)
    pipe = pipeline("fastertransformer", 300, 300, stages, max_num_seqs=12, block_size=8)
    seqs = range(40)
    for seq in seqs:
        pipe.add(SchedulerRequest(seq, prompt(rng.randint(1, 100), mark=seq), rng.randint(2, 30)))
    plans = run_all(pipe)
    lengths = {seq: pipe.requests[seq].max_tokens for seq in seqs}
    steps = {seq: [plan.step for plan in plans if seq in decodes(pipe, plan)] for seq in seqs}
    assert all(len(steps[seq]) == lengths[seq] - 1 for seq in seqs)
    batches: dict[int, set[int]] = {}
    for seq in seqs:
        batches.setdefault(steps[seq][0], set()).add(seq)
    # 300 blocks hold seven sequences of 300 tokens: three batches of two, or one of seven.
    assert max(map(len, batches.values())) == 7 // stages
    for members in batches.values():
        longest = max(members, key=lambda seq: lengths[seq])
        assert all(steps[seq] == steps[longest][: len(steps[seq])] for seq in members)
    for plan in plans:
        assert not (prefills(pipe, plan) and decodes(pipe, plan))
    spans = [(first, max(steps[seq][-1] for seq in batches[first])) for first in batches]
    for first, _ in spans:
        assert sum(begin <= first <= end for begin, end in spans) <= stages
    assert pipe.scheduler.stats().preemptions == 0


def test_a_batch_whose_prompts_take_several_micro_batches_decodes_when_all_are_computed() -> None:
    pipe = pipeline("fastertransformer", 4000, 400, max_num_batched_tokens=100, max_num_seqs=4)
    for seq in range(6):
        pipe.add(SchedulerRequest(seq, prompt(90, mark=seq), 5))
    rows = []
    for _ in range(5):
        plan = pipe.schedule()
        assert plan is not None
        rows.append([row.seq for row in plan.rows])
        pipe.commit()
    assert rows == [[0], [1], [2], [3], [0, 1, 2, 3]]
    pipe.drain()


def test_the_batch_goes_on_when_members_are_aborted() -> None:
    pipe = pipeline("fastertransformer", stages=2, max_num_seqs=8)
    for seq in range(16):
        pipe.add(SchedulerRequest(seq, prompt(20, mark=seq), 20))
    for _ in range(12):
        if pipe.schedule() is None:
            pipe.commit()
    pipe.abort([0, 1, 5])
    pipe.drain()
    assert {seq for seq, reason in pipe.ended.items() if reason == "abort"} == {0, 1, 5}
    assert len(pipe.ended) == 16
    assert pipe.scheduler.stats().kv_usage == 0
