"""Requests that continue in a new scheduler after the tokens that an earlier one reported."""

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import ScheduledRow
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_properties import pipelines, random_request
from tests.scheduler.test_traps import prompt
from tests.support.examples import further_runs, num_examples
from tests.support.products import covers_pairs
from tests.support.scheduler.pipeline import Pipeline, generate


def resume(old: Pipeline, new: Pipeline, first_seq: int) -> dict[int, int]:
    """Submit the unfinished sequences of one pipeline to another, requests in order of arrival.

    Returns:
        The old id of each new sequence.
    """
    old_seqs: dict[int, int] = {}
    new.now = old.now
    for seq, request in old.requests.items():
        if seq != request.seq:
            continue
        alive = [each for each in range(seq, seq + request.n) if each in old.alive]
        if not alive:
            continue
        outputs = [old.generated[each] for each in alive]
        resumed = SchedulerRequest(
            first_seq,
            request.prompt_token_ids,
            request.max_tokens,
            request.stop_token_ids,
            request.priority,
            request.cache_salt,
            len(alive),
            request.reads_prefix_cache,
            outputs=outputs if any(outputs) else (),
            age_seconds=old.now - old.arrival_times[seq],
        )
        new.add(resumed)
        old_seqs.update(zip(range(first_seq, first_seq + len(alive)), alive, strict=True))
        first_seq += len(alive)
    return old_seqs


class Epochs:
    """Pipelines one after the other; a cut ends one at whatever moment it is."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.requests: list[tuple[SchedulerRequest, int]] = []
        """Each choice: its request as first submitted and its sequence now."""
        self.ended: dict[int, tuple[list[int], str]] = {}
        """Output and finish reason of choices that ended before the last cut."""
        self._next_seq = 0

    def add(self, rng: Random) -> None:
        request = random_request(rng, self._next_seq, self.pipeline.config.max_model_len)
        self._next_seq += request.n
        self.pipeline.add(request)
        self.requests += [(request, seq) for seq in range(request.seq, request.seq + request.n)]

    def cut(self, new: Pipeline) -> None:
        """Go on in a new pipeline; plans in flight are lost."""
        old = self.pipeline
        new_seqs = {old: new for new, old in resume(old, new, self._next_seq).items()}
        self._next_seq += len(new_seqs)
        for choice, (request, seq) in enumerate(self.requests):
            if seq in new_seqs:
                self.requests[choice] = request, new_seqs[seq]
            elif choice not in self.ended:
                self.ended[choice] = old.generated[seq], old.ended[seq]
        self.pipeline = new

    def results(self) -> list[tuple[SchedulerRequest, list[int], str]]:
        """Each choice's request, output and finish reason."""
        last = self.pipeline
        ends = {
            choice: self.ended.get(choice) or (last.generated[seq], last.ended[seq])
            for choice, (_, seq) in enumerate(self.requests)
        }
        return [(request, *ends[choice]) for choice, (request, _) in enumerate(self.requests)]


def drive(run: Epochs, rng: Random, steps: int) -> None:
    arrivals = rng.choice([0.02, 0.1, 0.5])
    for _ in range(steps):
        pipeline = run.pipeline
        if rng.random() < arrivals and len(pipeline.alive) < 40:
            run.add(rng)
        if rng.random() < 0.02 and pipeline.alive:
            pipeline.abort([rng.choice(sorted(pipeline.alive))])
        if pipeline.plans and rng.random() < 0.5:
            pipeline.commit()
        else:
            pipeline.schedule()


@further_runs(2)
@settings(
    max_examples=num_examples(12, 200),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
@given(
    first=pipelines(),
    configs=st.lists(pipelines(), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_a_run_that_is_cut_ends_like_an_undisturbed_one(
    run: int, first: Pipeline, configs: list[Pipeline], seed: int
) -> None:
    """Cuts happen at random moments; the next pipeline has other stages and another policy."""
    rng = Random(seed)
    life = Epochs(first)
    drive(life, rng, rng.randint(1, 200))
    for other in configs:
        config = other.config
        num_blocks = -(-first.config.max_model_len // config.block_size)
        new = Pipeline(
            config.resolve(
                config.stages, num_blocks + config.num_blocks, first.config.max_model_len
            ),
            first.forces,
        )
        life.cut(new)
        drive(life, rng, rng.randint(1, 100))
    life.pipeline.drain()
    for request, output, reason in life.results():
        alone = generate(request, first.forces)
        if reason == "abort":
            assert output == alone[: len(output)]
        else:
            assert output == alone
            assert reason == ("stop" if alone[-1] in request.stop_token_ids else "length")
    stats = life.pipeline.scheduler.stats()
    assert (stats.running, stats.waiting, stats.in_flight, stats.kv_usage) == (0, 0, 0, 0.0)


@further_runs(3)
@settings(max_examples=num_examples(3, 100), deadline=None, database=None)
@given(
    num_stages=st.integers(1, 4),
    prefix_cache=st.booleans(),
    async_scheduling=st.booleans(),
    chunk=st.sampled_from([5, 16, 200]),
)
def test_every_cut_of_one_run(
    run: int, num_stages: int, prefix_cache: bool, async_scheduling: bool, chunk: int
) -> None:
    """Between any two commits, with the same configuration."""
    config = SchedulerConfig(
        prefix_cache=prefix_cache,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=chunk,
        max_prefill_tokens=chunk,
        min_prefill_tokens=1,
        block_size=4,
    ).resolve(num_stages, 60, 60)
    requests = [
        SchedulerRequest(0, prompt(19), 12, n=3),
        SchedulerRequest(3, prompt(7, mark=2), 20, reads_prefix_cache=False),
        SchedulerRequest(4, prompt(1, mark=3), 5, frozenset(range(0, 50, 3))),
    ]
    expected = {seq: generate(r) for r in requests for seq in range(r.seq, r.seq + r.n)}
    num_commits = 0
    while True:
        old = Pipeline(config)
        for request in requests:
            old.add(request)
        for _ in range(num_commits):
            while old.schedule() is not None:
                pass
            if old.plans:
                old.commit()
        if not old.alive:
            break
        new = Pipeline(config)
        old_seqs = resume(old, new, 5)
        new.drain()
        outputs = {seq: old.generated[seq] for seq in old.ended}
        outputs |= {old_seq: new.generated[seq] for seq, old_seq in old_seqs.items()}
        assert outputs == expected
        num_commits += 1
    assert num_commits >= 20


OUTPUTS = [
    [0, 0, 0, 0],
    [0, 9, 0, 30],
    [9, 0, 17, 0],
    [30, 31, 32, 33],
    [33, 1, 1, 1],
]


@covers_pairs(lengths=OUTPUTS, prefix_cache=[True, False], prompt_len=[96, 100], chunk=[24, 512])
def test_the_prompt_of_several_choices_is_computed_once(
    lengths: list[int], prefix_cache: bool, prompt_len: int, chunk: int
) -> None:
    """Each choice computes its own output and what its first block has of the prompt."""
    config = SchedulerConfig(
        prefix_cache=prefix_cache,
        expected_output_tokens=0,
        max_prefill_tokens=chunk,
        min_prefill_tokens=1,
        max_num_batched_tokens=chunk,
    )
    pipeline = Pipeline(config.resolve(2, 100, 200))
    alone = generate(SchedulerRequest(0, prompt(prompt_len), 40))
    outputs = [alone[:length] for length in lengths]
    pipeline.add(SchedulerRequest(0, prompt(prompt_len), 40, n=4, outputs=outputs))
    pipeline.drain()
    assert all(pipeline.generated[seq] == alone for seq in range(4))
    least = prompt_len + sum(lengths)
    num_tokens = pipeline.scheduler.stats().prefill_tokens
    # The outputs are alike: with a prefix cache they share more than the prompt.
    assert (prompt_len if prefix_cache else least) <= num_tokens <= least + 3 * 16


def prefill_rows(pipeline: Pipeline, seq: int) -> list[ScheduledRow]:
    """Schedule and commit until a sequence runs for the first time; its row."""
    while True:
        plan = pipeline.schedule()
        if plan is None:
            pipeline.commit()
            continue
        if rows := [row for row in plan.rows if row.seq == seq]:
            return rows


def test_choices_start_when_the_prompt_is_computed_not_the_first_one_s_output() -> None:
    config = SchedulerConfig(
        max_prefill_tokens=16, min_prefill_tokens=1, max_num_batched_tokens=16, policy="sarathi"
    )
    pipeline = Pipeline(config.resolve(1, 100, 400))
    alone = generate(SchedulerRequest(0, prompt(32), 300))
    pipeline.add(SchedulerRequest(0, prompt(32), 300, n=2, outputs=[alone[:200], []]))
    for _ in range(3):
        assert pipeline.schedule()
        pipeline.commit()
    assert pipeline.scheduler.describe().waiting_seqs == [0, 1], "the fork has happened"
    pipeline.drain()
    assert [pipeline.generated[seq] for seq in range(2)] == [alone, alone]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_next_choice_computes_the_prompt_if_the_first_ends_before(prefix_cache: bool) -> None:
    config = SchedulerConfig(
        prefix_cache=prefix_cache,
        max_prefill_tokens=16,
        min_prefill_tokens=1,
        max_num_batched_tokens=16,
    )
    pipeline = Pipeline(config.resolve(1, 100, 200))
    alone = generate(SchedulerRequest(0, prompt(96), 40))
    outputs = [alone[:5], alone[:20], [], alone[:1]]
    pipeline.add(SchedulerRequest(0, prompt(96), 40, n=4, outputs=outputs))
    pipeline.schedule()
    pipeline.commit()
    pipeline.abort([0])
    before = pipeline.scheduler.stats().prefill_tokens
    pipeline.drain()
    assert all(pipeline.generated[seq] == alone for seq in range(1, 4))
    assert pipeline.scheduler.stats().prefill_tokens - before <= 96 + 21 + 3 * 16


def test_a_resumed_request_keeps_its_place() -> None:
    """It goes before one that arrived later, but is submitted earlier; not before its betters."""
    config = SchedulerConfig(
        policy="sarathi", max_num_batched_tokens=16, max_prefill_tokens=16, min_prefill_tokens=1
    )
    pipeline = Pipeline(config.resolve(1, 100, 200))
    for seq, (age, priority) in enumerate([(0.0, 0), (0.5, 0), (9.0, 0), (0.0, -1), (9.0, 1)]):
        tokens = prompt(16, mark=seq)
        outputs = [generate(SchedulerRequest(seq, tokens, 8))[:seq]]
        pipeline.add(
            SchedulerRequest(seq, tokens, 8, priority=priority, outputs=outputs, age_seconds=age)
        )
    assert pipeline.scheduler.describe().waiting_seqs == [3, 2, 1, 0, 4]
    pipeline.drain()


def test_figures_count_what_this_scheduler_did() -> None:
    """Reported once: first tokens, cached tokens. Learned from: outputs in full length."""
    config = SchedulerConfig(block_size=4)
    pipeline = Pipeline(config.resolve(1, 100, 200))
    alone = generate(SchedulerRequest(0, prompt(20), 24))
    pipeline.add(SchedulerRequest(0, prompt(20), 24, outputs=[alone[:10]], age_seconds=5.0))
    first_tokens = []
    while pipeline.alive:
        if pipeline.schedule() is None:
            first_tokens += pipeline.commit().first_tokens
    stats = pipeline.scheduler.stats()
    assert not first_tokens
    assert (stats.prefix_queries, stats.prefix_hits) == (0, 0)
    assert (stats.prefill_tokens, stats.decode_tokens) == (30, 13)
    assert pipeline.scheduler.output_lengths.predict(24, 0) == 24
    # Its prompt and output are in the prefix cache, and its first token is still to come.
    pipeline.add(SchedulerRequest(1, prompt(20), 24, age_seconds=5.0))
    while pipeline.alive:
        if pipeline.schedule() is None:
            first_tokens += pipeline.commit().first_tokens
    (first,) = first_tokens
    assert (first.seq, first.num_cached_tokens, first.queue_seconds) == (1, 16, 6.0)


@pytest.mark.parametrize(
    "outputs", [[[5]], [[5], [6] * 8], [[5], [6, 9]], [[5], [6], [7]]], ids=str
)
def test_outputs_of_other_requests_are_rejected(outputs: list[list[int]]) -> None:
    scheduler = Pipeline(SchedulerConfig().resolve(1, 100, 200)).scheduler
    request = SchedulerRequest(0, [1, 2], 8, frozenset([9]), n=2, outputs=outputs)
    with pytest.raises(ValueError, match="outputs has"):
        scheduler.add(request, 0.0)
    assert not scheduler.stats().unfinished
