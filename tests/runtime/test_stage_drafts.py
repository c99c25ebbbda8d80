"""Drafts that the last stage computes: same texts, and right guesses wherever they can be right.

A draft model that is the served model itself guesses every token, as long as its keys and values
are right: after chunks, wrong guesses of others, prefix hits, preemptions and forks.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gllm.config.engine import EngineConfig
from gllm.models.config import read_config
from gllm.models.draft import DraftModel
from gllm.models.errors import ModelError
from gllm.models.loader import Checkpoint
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.executor import Executor
from tests.runtime.test_resume import CHOICES, PROMPT, REQUESTS, greedy, sampled, stages_of
from tests.support.engines.epochs import (
    CHUNKED,
    NUM_BLOCKS,
    Epoch,
    Stages,
    run_undisturbed,
    stages_on_cpu,
    tensor_tokens,
)
from tests.support.engines.scheduled_stages import ScheduledStages
from tests.support.models.prediction_heads import HEADS, HeadReference, save_with_head
from tests.support.models.tiny_models import save
from tests.support.text.grammar_writing import FOLDER

pytestmark = pytest.mark.usefixtures("compiled_kernels")

ITSELF = {"method": "draft_model", "model": str(FOLDER), "num_speculative_tokens": 3}
"""The served model drafts for itself."""
STAGES = [1, pytest.param(2, marks=pytest.mark.full)]
QUICK = ("seed", "all penalties")
KINDS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in REQUESTS]


@cache
def drafting_stages(num_stages: int = 1, **config: Any) -> Stages:
    return stages_on_cpu(FOLDER, num_stages, speculative_config=ITSELF | config, **CHUNKED)


def serve(stages: Stages, num_blocks: int = NUM_BLOCKS, **options: Any) -> ScheduledStages:
    config = replace(stages.scheduler_config, num_blocks=num_blocks, **options)
    return ScheduledStages(stages, config)


def texts_without_drafts(num_stages: int, add: Callable[[ScheduledStages], object]) -> Any:
    served = serve(stages_of(num_stages))
    add(served)
    return served.run()


def check_all_right(served: ScheduledStages) -> None:
    """Every guess that was verified was right, and there were many."""
    stats = served.scheduler.stats()
    assert stats.draft_tokens > 20
    assert stats.accepted_tokens == stats.draft_tokens


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("request_name", KINDS)
def test_every_kind_of_request(request_name: str, num_stages: int) -> None:
    """Also after a death at some positions."""
    request = REQUESTS[request_name]()
    snapshots = run_undisturbed(stages_of(num_stages), request)
    (whole,) = snapshots[-1]
    guessed = run_undisturbed(drafting_stages(num_stages), request)
    assert guessed[-1] == [whole]
    if not (request.sampling.grammar or request.sampling.needs_prompt):
        assert len(guessed) <= len(snapshots)
    scores_prompt = request.sampling.prompt_logprobs is not None
    for length in range(1, len(whole.tokens), 11):
        start = whole.cut(length, scores_prompt)
        (output,) = Epoch(drafting_stages(num_stages), request, [start]).run()
        assert output == whole, length


@pytest.mark.parametrize("request_name", CHOICES)
def test_several_choices(request_name: str) -> None:
    request = CHOICES[request_name]()
    request.n = 3
    whole = run_undisturbed(stages_of(1), request)[-1]
    stages = drafting_stages(1)
    assert run_undisturbed(stages, request)[-1] == whole
    assert stages.executors[-1].held_seqs == stages.executors[0].held_seqs


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("windows", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_served_model_guesses_every_token_of_its_own(num_stages: int, windows: int) -> None:
    """Greedy and random texts of several lengths in one micro-batch, prompts in chunks, forks."""

    def add(served: ScheduledStages) -> None:
        served.add(PROMPT, 30)
        served.add(tensor_tokens(29, 1), 25, temperature=1.0, seed=5)
        served.add(tensor_tokens(17, 2), 30, n=3, temperature=0.8, top_p=0.9, seed=6)

    served = serve(drafting_stages(num_stages, max_windows_in_flight=windows))
    add(served)
    assert served.run() == texts_without_drafts(num_stages, add)
    check_all_right(served)


def test_windows_continue_each_other() -> None:
    """Two windows of a sequence in flight have the guesses of one draft."""
    served = serve(drafting_stages(2, max_windows_in_flight=2))
    served.add(PROMPT, 40)
    served.run()
    check_all_right(served)
    one = serve(drafting_stages(2))
    one.add(PROMPT, 40)
    assert one.run() == list(served.outputs.values())
    longest = max(len(drafts) for _, drafts in served.drafts)
    assert (longest, max(len(drafts) for _, drafts in one.drafts)) == (7, 3)


def test_preempted_sequences_have_right_guesses_again() -> None:
    def add(served: ScheduledStages) -> None:
        for seed in range(5):
            served.add(tensor_tokens(20, seed), 40, temperature=1.0, seed=seed)

    served = serve(drafting_stages(1), num_blocks=20, kv_threshold=0.0, kv_admission="greedy")
    add(served)
    assert served.run() == texts_without_drafts(1, add)
    assert served.scheduler.stats().preemptions > 0
    check_all_right(served)


@pytest.mark.parametrize("num_stages", STAGES)
def test_prefix_hits_have_the_draft_s_keys_and_values(num_stages: int) -> None:
    shared = tensor_tokens(24, 9)

    def add(served: ScheduledStages) -> None:
        served.add([*shared, 5, 6], 20)
        served.run()
        served.add([*shared, 7], 20)
        served.add([*shared, 5, 6], 20, temperature=1.0, seed=3)

    served = serve(drafting_stages(num_stages))
    add(served)
    assert served.run() == texts_without_drafts(num_stages, add)
    assert served.scheduler.stats().prefix_hits >= 48
    check_all_right(served)


def test_aborted_sequences_leave_nothing() -> None:
    stages = drafting_stages(1)
    served = serve(stages)
    first, second = served.add(PROMPT, 60), served.add(tensor_tokens(30, 3), 30)
    for _ in range(4):
        served.step()
    served.abort(first)
    served.run()
    assert (
        served.outputs[second]
        == texts_without_drafts(1, lambda s: s.add(tensor_tokens(30, 3), 30))[0]
    )
    check_all_right(served)
    assert served.scheduler.stats().kv_usage == 0
    assert not served.scheduler.table.sequences


def test_no_drafts_where_they_are_not_worth_their_time() -> None:
    """A step takes as long as its tokens: the last stage only follows the texts."""
    served = serve(drafting_stages(1), ridge_tokens=1)
    for seed in range(8):
        served.add(tensor_tokens(10, seed), 20)
    served.run()
    assert len(served.drafts) < 8
    assert served.scheduler.stats().draft_tokens < 8


def model_of(executor: Executor) -> DraftModel | None:
    """Return the weights of an executor's draft, if it has them."""
    assert executor._draft is not None
    return executor._draft.model


def test_a_draft_that_fails_costs_no_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stages = drafting_stages(1)
    model = model_of(stages.executors[-1])
    assert model is not None

    def fail(*args: object) -> torch.Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(model, "forward", fail)
    request = sampled()
    assert run_undisturbed(stages, request)[-1] == run_undisturbed(stages_of(1), request)[-1]
    assert "texts go on without its guesses" in caplog.text


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "deepseek-v3" else pytest.mark.full)
        for name in HEADS
    ],
)
def head(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, HeadReference]:
    """A checkpoint with a prediction head."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_with_head(request.param, folder)


def head_stages(folder: Path, num_stages: int, **config: Any) -> Stages:
    options = {"method": "mtp", "num_speculative_tokens": 3} | config
    return stages_on_cpu(folder, num_stages, speculative_config=options, **CHUNKED)


@pytest.mark.parametrize("num_stages", STAGES)
def test_a_prediction_head_guesses_what_transformers_layers_compute(
    head: tuple[Path, HeadReference], num_stages: int
) -> None:
    """Prompts in chunks, several sequences, right and wrong guesses."""
    folder, reference = head
    served = serve(head_stages(folder, num_stages))
    prompts = [[token % 100 + 3 for token in tensor_tokens(length, length)] for length in (5, 27)]
    for prompt in prompts:
        served.add(prompt, 14)
    outputs = served.run()
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(prompt)
        while len(tokens) < len(prompt) + 14:
            tokens.append(reference.next_token(tokens))
        assert output == tokens[len(prompt) :]
    assert len(served.drafts) > 10
    for text, drafts in served.drafts:
        assert reference.guess(text, len(drafts)) == drafts, len(text)
    assert max(len(drafts) for _, drafts in served.drafts) == 3


def test_the_head_is_read_for_speculation_alone(head: tuple[Path, HeadReference]) -> None:
    folder, _ = head
    model = read_config(folder).model
    with Checkpoint(folder, torch.float32, model, range(model.num_layers)) as checkpoint:
        assert not any("mtp" in name or "layers.3." in name for name in checkpoint.stored_shapes)
    without, drafting = (
        stages_on_cpu(folder, 1, speculative_config=config).executors[0]
        for config in (None, {"method": "mtp"})
    )
    # Embedding and LM head are shared.
    unread = ("embed_tokens", "shared_head.head", "indexer")
    own = sum(
        tensor.nbytes
        for name, tensor in load_file(folder / "model.safetensors").items()
        if ("layers.3." in name or "mtp_layers." in name)
        and not any(part in name for part in unread)
    )
    assert drafting.weight_bytes - without.weight_bytes == own > 0
    assert drafting.block_bytes > without.block_bytes


@pytest.mark.full
def test_a_sequence_that_continues_in_chunks_has_the_states_between_them(
    head: tuple[Path, HeadReference],
) -> None:
    """A preempted sequence computes its output again in chunks whose ends are no prompt tokens."""
    folder, reference = head
    served = serve(head_stages(folder, 1), num_blocks=16, kv_threshold=0.0, kv_admission="greedy")
    for seed in range(4):
        prompt = [token % 100 + 3 for token in tensor_tokens(12, seed)]
        served.add(prompt, 40)
    served.run()
    assert served.scheduler.stats().preemptions > 0
    for text, drafts in served.drafts[-20:]:
        assert reference.guess(text, len(drafts)) == drafts, len(text)


def test_the_weights_of_a_draft_pass_from_stage_to_stage() -> None:
    """Over a recovery at once; over a change of layers when the stage before has ended."""
    model = read_config(FOLDER)
    config = EngineConfig.from_options(str(FOLDER), speculative_config=ITSELF, dtype="float32")

    def load(layers: range, **others: Any) -> CpuExecutor:
        executor = CpuExecutor(model, config, 2, layers)
        executor.load(FOLDER, lambda done, total: None, **others)
        return executor

    first = load(range(3, 6))
    draft = model_of(first)
    assert draft is not None
    second = load(range(3, 6), previous=[first])
    assert model_of(second) is draft
    assert second.weight_bytes == first.weight_bytes > draft.weight_bytes
    prepared = load(range(2, 6), running=second)
    assert model_of(prepared) is None
    third = load(range(2, 6), previous=[prepared, second])
    assert model_of(third) is draft
    assert model_of(second) is None


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = save("llama2", tmp_path)
    config = EngineConfig.from_options(str(folder), speculative_config={"method": "mtp"})
    model = read_config(folder)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has none .* choose method ngram"):
        CpuExecutor(model, config, 1, range(4))


def test_greedy_text_needs_fewer_steps() -> None:
    request = greedy()
    request.max_tokens = 40
    without = run_undisturbed(stages_of(1), request)
    assert len(run_undisturbed(drafting_stages(1), request)) < len(without) / 2.5
