"""An engine whose model has recurrent layers: cached states, and a stage that is killed."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.options.field_types import FieldError
from tests.support.engines.local_workers import LocalWorkers
from tests.support.gpu.device_stage import host_as_gpu
from tests.support.models.tiny_models import FAMILIES, sizes
from tests.support.text.tokenizers import byte_level, save

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PROMPTS = [[*range(5, 60)] + [70 + number] * 30 for number in range(4)]


def make_folder(family: str, folder: Path) -> Path:
    """A random model of four layers with a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    options = sizes(FAMILIES[family]) | {"vocab_size": 402, "initializer_range": 0.2}
    name = FAMILIES[family].name
    config = getattr(transformers, f"{name}Config")(**options)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    save(folder, byte_level())
    return folder


TWO_STAGES = {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("family", "is_on_gpu", "options"),
    [
        ("qwen3-next", False, TWO_STAGES),
        pytest.param("qwen3-next", True, TWO_STAGES, marks=pytest.mark.full),
        pytest.param("qwen3-next", False, {"tensor_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param("kimi-linear", False, TWO_STAGES, marks=pytest.mark.full),
        pytest.param("mamba2", False, TWO_STAGES, marks=pytest.mark.full),
    ],
    ids=["two stages", "two stages on a device", "two ranks", "Kimi Linear", "no attention"],
)
async def test_texts_are_the_same_with_cached_states_and_after_a_death(
    family: str, is_on_gpu: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    limits: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    options = options | limits | {"dtype": "float32", "threads": 1, "kv_cache_memory": 2**21}
    config = EngineConfig.from_options(str(make_folder(family, tmp_path)), **options)
    workers, device = LocalWorkers(), host_as_gpu() if is_on_gpu else nullcontext()
    has_begun = asyncio.Event()

    async def generate(prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        async for delta in engine.generate(prompt, LONG):
            tokens += delta.token_ids
            if len(tokens) >= 12:
                has_begun.set()
        return tokens

    with device:
        async with Engine(config, node=workers) as engine:
            alone = [await generate(prompt) for prompt in PROMPTS]
            stats = engine.status().stats
            # The third and fourth prompt start at the branch point.
            assert stats.prefix_hits == 2 * 48
            assert stats.state_slots == 32
            assert stats.used_state_slots == 0
            has_begun.clear()
            running = [asyncio.create_task(generate(prompt)) for prompt in PROMPTS]
            await has_begun.wait()
            workers.kill(max(workers.workers))
            assert await asyncio.gather(*running) == alone
            assert sum(engine.status().recoveries.values()) == 1
            assert engine.status().stats.state_slots == 32


def test_kv_blocks_do_not_move_to_other_engines_and_disks(tmp_path: Path) -> None:
    folder = make_folder("qwen3-next", tmp_path)
    for name, value in {"kv_transfer": "tcp", "kv_cache_disk": f"{tmp_path}:1GiB"}.items():
        message = rf"{name} .* recurrent layers.* leave {name} out"
        with pytest.raises(FieldError, match=message):
            Engine(EngineConfig.from_options(str(folder), **{name: value}))
