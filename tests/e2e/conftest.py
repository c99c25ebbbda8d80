"""A model small enough to be served for real in tests, and what one machine answers.

Both are made once for all workers of pytest-xdist.
"""

import fcntl
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.servers.nodes import EXACT
from tests.support.servers.recovery_load import Answer, Load
from tests.support.servers.server import Server, serving
from tests.support.text.tokenizers import CHATML, byte_level, save

FOLDER = Path(__file__).parent


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a path of this run of the tests; the first process that needs it makes it."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / name
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")
            make(unfinished)
            unfinished.rename(path)
    return path


def save_tiny_model(folder: Path) -> None:
    """Write a random Qwen3 of four layers with a tokenizer, a chat template and a length of 512."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=402,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=2,
        initializer_range=0.3,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    save(folder, byte_level(), chat_template=CHATML)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model of `save_tiny_model`; nobody writes to it."""
    return make_once(tmp_path_factory, "tiny-model", save_tiny_model)


LONGEST = (
    "test_lm_eval",
    "test_engine",
    "test_faults",
    "test_tensor_parallel",
    "test_recovery",
    "test_cluster",
    "test_ray",
    "test_structured",
    "test_nodes",
    "test_step_log",
    "test_router",
    "test_survive",
    "test_conversation",
    "test_answers",
    "test_doors",
    "test_uneven",
    "test_serving",
    "test_demo",
    "test_bench",
    "test_sampling",
    "test_kv_kills",
    "test_nodes_elastic",
    "test_disaggregation",
    "test_kv_pairs",
)
"""Files in the order of their time, the longest one first, so that no worker ends much later than
the others; all others follow."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder by LONGEST; `--no-loadscope-reorder` keeps this order."""
    ranks = {f"{name}.py": rank for rank, name in enumerate(LONGEST)}
    places = [at for at, item in enumerate(items) if FOLDER in item.path.parents]
    tests = [items[at] for at in places]
    tests.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
    for at, item in zip(places, tests, strict=True):
        items[at] = item


class Undisturbed(NamedTuple):
    """Answers of an engine of one stage on one machine."""

    answers: dict[str, Answer]
    """To requests of all kinds."""
    token_ids: list[list[int]]
    """To GREEDY, by prompt."""


GREEDY: dict[str, Any] = {
    "prompt": [random.Random(n).choices(range(300, 2000), k=60 + n) for n in range(100)],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
"""A request with 100 prompts that have nothing in common."""


def greedy_tokens(server: Server) -> list[list[int]]:
    """The output tokens of each prompt of GREEDY."""
    status, body = server.post("/v1/completions", GREEDY)
    assert status == 200, body
    return [choice["token_ids"] for choice in body["choices"]]


def save_undisturbed(path: Path) -> None:
    """Write the answers of one machine."""
    with serving("demo", *EXACT) as server:
        answers = Undisturbed(Load(server, "one machine").wait(), greedy_tokens(server))
    path.write_bytes(pickle.dumps(answers))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Answers of one machine."""
    path = make_once(tmp_path_factory, "undisturbed", save_undisturbed)
    answers: Undisturbed = pickle.loads(path.read_bytes())
    return answers


@pytest.fixture(scope="session")
def expected(undisturbed: Undisturbed) -> dict[str, Answer]:
    """Answers of one machine to requests of all kinds."""
    assert all(not answer.errors for answer in undisturbed.answers.values())
    return undisturbed.answers
