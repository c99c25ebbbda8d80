"""`--config FILE`: flags as YAML, overridden by those of the command line; and `--seed`."""

from pathlib import Path

import pytest
import yaml

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.config.server import ServerConfig
from gllm.messages.requests import SubmitRequest
from gllm.options.flags import config_from_flags
from gllm.serve import make_parser
from tests.support.engines.ready import create_engine


def parse(folder: Path, flags: object, *arguments: str) -> tuple[EngineConfig, ServerConfig]:
    file = folder / "flags.yaml"
    file.write_text(flags if isinstance(flags, str) else yaml.safe_dump(flags))
    values = make_parser().parse_args([*arguments, "--config", str(file)])
    return config_from_flags(EngineConfig, values), config_from_flags(ServerConfig, values)


FLAGS = {
    "model": "some/model",
    "pp": 2,
    "layers": [3, 4],
    "max-model-len": 128,
    "kv_cache_memory": "2GiB",
    "prefix-cache": False,
    "api-key": ["a", "b"],
    "allowed-origins": "*",
    "read-timeout": 5,
    "served_model_name": None,
    "host": "::1",
}


def test_every_kind_of_value(tmp_path: Path) -> None:
    engine, server = parse(tmp_path, FLAGS)
    assert (engine.model, engine.pipeline_parallel_size, engine.layers) == ("some/model", 2, (3, 4))
    assert (engine.max_model_len, engine.kv_cache_memory) == (128, 2**31)
    assert not engine.scheduler.prefix_cache
    assert (server.api_key, server.allowed_origins) == (("a", "b"), ("*",))
    assert (server.read_timeout, server.served_model_name, server.host) == (5.0, None, "::1")


def test_the_command_line_wins(tmp_path: Path) -> None:
    arguments = [
        "--max-model-len=64",
        "--prefix-cache",
        "--api-key",
        "c",
        "--pipeline-parallel",
        "2",
    ]
    engine, server = parse(tmp_path, FLAGS, *arguments)
    assert engine.max_model_len == 64
    assert engine.scheduler.prefix_cache
    assert server.api_key == ("c",)
    # A default value that is given wins, too.
    assert parse(tmp_path, {"port": 5}, "--port", "8000")[1].port == 8000


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"])
def test_a_file_without_flags(tmp_path: Path, text: str) -> None:
    assert parse(tmp_path, text) == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max-modle-len": 5}, "no flag 'max-modle-len': did you mean max-model-len?"),
        ({"zzzzzz": 5}, "no flag 'zzzzzz'"),
        ({"no-prefix-cache": True}, "did you mean prefix-cache?"),
        ({"port": 99999}, "argument --port: '99999' has to be an integer in [0, 65535]"),
        ({"port": True}, "port is True"),
        ({"prefix-cache": "off"}, "prefix-cache is 'off', but has to be true or false"),
        ({"dtype": "int3"}, "argument --dtype: invalid choice: 'int3'"),
        ({"host": {"a": 1}}, "host is {'a': 1}"),
        ({"config": "other.yaml"}, "cannot name another"),
        ({"help": 1}, "no flag 'help'"),
        ("port: 1\nhost: x\nport: 2", "has 'port' twice, in lines 1 and 3"),
        ("a: {b: 1, b: 2}", "has 'b' twice, in lines 1 and 1"),
        ("pp: 2\npipeline-parallel-size: 3", "'pp' and 'pipeline-parallel-size' set the same"),
        ("max-model-len: 2\nmax_model_len: 2", "'max-model-len' and 'max_model_len' set the same"),
        ("- port", "has to be a mapping"),
        ("1: 2", "has to be a mapping"),
        ("port: [", "is not YAML"),
        ("a: &a [*a", "is not YAML"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_files_that_cannot_be(
    tmp_path: Path, flags: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(tmp_path, flags)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--config {tmp_path / 'flags.yaml'}" in line
    assert words in line


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--config", "/nowhere.yaml"])
    assert "--config /nowhere.yaml: cannot be read: No such file" in capsys.readouterr().err


async def seeds(*own: int | None, seed: int | None) -> list[int]:
    """The seeds of requests, some of which have their own, in an engine with a seed."""
    engine, backend = create_engine(EngineConfig(seed=seed))
    for each in own:
        await engine.submit([[1, 2], [3]], SamplingParams(seed=each))
    return [each.sampling.seed for each in backend.sent if isinstance(each, SubmitRequest)]


async def test_an_engine_with_a_seed_repeats_itself() -> None:
    first = await seeds(None, None, seed=5)
    assert len(set(first)) == 4
    assert await seeds(None, 7, None, seed=5) == [*first[:2], 7, 7, *first[2:]]
    assert await seeds(None, None, seed=6) != first
    assert await seeds(None, seed=None) != await seeds(None, seed=None)
