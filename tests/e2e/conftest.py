"""A small model, what one machine answers, and servers that tests share.

The model and the answers are made once for all processes of pytest-xdist.
"""

import fcntl
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from xdist.scheduler import LoadScopeScheduling, Scheduling  # type: ignore[import-untyped]

from tests.support.servers.nodes import EXACT
from tests.support.servers.pool import SHARED_SERVERS, ServerPool
from tests.support.servers.recovery_load import Answer, Load
from tests.support.servers.server import Server, serving
from tests.support.text.tokenizers import CHATML, byte_level, save

FOLDER = Path(__file__).parent
POISON = 300
"""A token whose embedding is not a number in the model `poisoned`."""


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


@pytest.fixture(scope="session")
def poisoned(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with one token that computes to nothing."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("poisoned")
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "eos_token_id": 2}')
    return folder


@pytest.fixture(scope="session")
def pool() -> Iterator[ServerPool]:
    """Servers that the tests of this process share."""
    servers = ServerPool(max_servers=2)
    yield servers
    servers.close()


def find_scope(node_id: str) -> tuple[bool, str]:
    """Return what a test shares with others, which one process of pytest-xdist therefore runs.

    Returns:
        False and the name of a shared server; or True and what has fixtures of its own: the file of
        the test, or the chat page's folder, which has one browser.
    """
    path, _, test = node_id.partition("::")
    params = test.partition("[")[2]
    for server in SHARED_SERVERS:
        if server.name in params:
            return False, server.name
    return True, "page" if "page" in Path(path).parts else path


class ServerScheduling(LoadScopeScheduling):
    """Scheduling of pytest-xdist that runs all tests of a shared server in one process.

    The marker `xdist_group` has no effect with this version of pytest.
    """

    def _split_scope(self, nodeid: str) -> str:
        return find_scope(nodeid)[1]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Schedule the tests of this folder by `find_scope`, with the options that group tests."""
    is_grouped = config.getvalue("dist") in ("loadscope", "loadgroup")
    return ServerScheduling(config, log) if is_grouped else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder by `find_scope`; `--no-loadscope-reorder` keeps the order.

    Shared servers have the most tests. Files that follow are short, so no process ends much later
    than the others.
    """
    places = [at for at, item in enumerate(items) if FOLDER in item.path.parents]
    tests = sorted((items[at] for at in places), key=lambda item: find_scope(item.nodeid))
    for at, item in zip(places, tests, strict=True):
        items[at] = item


class Undisturbed(NamedTuple):
    """Answers of an engine of one stage on one machine."""

    answers: dict[str, Answer]
    """To requests of all kinds."""
    token_ids: list[list[int]]
    """To GREEDY, by prompt."""
    stories: list[list[int]]
    """Tokens of the continuations of OPENINGS."""


GREEDY: dict[str, Any] = {
    "prompt": [random.Random(n).choices(range(300, 2000), k=60 + n) for n in range(100)],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
"""A request with 100 prompts that have nothing in common."""


OPENINGS: dict[str, Any] = {
    **GREEDY,
    "prompt": ["Once upon a time", "There was once a fox", "Not far from here", "The old man said"],
    "max_tokens": 48,
}
"""A request with longer outputs of texts that the model knows."""


def greedy_tokens(server: Server, fields: dict[str, Any] = GREEDY) -> list[list[int]]:
    """The output tokens of each prompt of a request such as GREEDY."""
    status, body = server.post("/v1/completions", fields)
    assert status == 200, body
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return [choice["token_ids"] for choice in choices]


def fetched_greedy_tokens(server: Server) -> list[list[int]]:
    """Return `greedy_tokens` of prompts that an engine fetches, half of them at a time.

    Of more, those that would wait behind MAX_WAITING_FETCHES others are computed.
    """
    prompts = GREEDY["prompt"]
    middle = len(prompts) // 2
    halves = (prompts[:middle], prompts[middle:])
    return [
        tokens for half in halves for tokens in greedy_tokens(server, {**GREEDY, "prompt": half})
    ]


def save_undisturbed(path: Path) -> None:
    """Write the answers of one machine."""
    with serving("demo", *EXACT) as server:
        answers = Load(server, "one machine").wait()
        undisturbed = Undisturbed(answers, greedy_tokens(server), greedy_tokens(server, OPENINGS))
    path.write_bytes(pickle.dumps(undisturbed))


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
