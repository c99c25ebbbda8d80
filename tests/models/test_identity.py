"""Digests of models: equal for copies, different for models of one architecture."""

import shutil
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from gllm.models.errors import ModelError
from gllm.models.hub import DEMO
from gllm.models.identity import describe_numerics, hash_model, hash_numerics
from gllm.models.weight_files import find_weight_files


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "copy"))


def test_a_copy_is_the_same_model(copy: Path) -> None:
    assert hash_model(copy) == hash_model(DEMO)
    (copy / "tokenizer_config.json").write_text("{}")
    assert hash_model(copy) == hash_model(DEMO)


def test_other_weights_of_the_same_shapes(copy: Path) -> None:
    path = find_weight_files(copy)[0]
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    before = hash_model(copy)
    save_file(tensors, path)
    same = hash_model(copy)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + 1
    save_file(tensors, path)
    assert len({before, hash_model(copy), same}) >= 2
    assert hash_model(copy) != same


def test_another_configuration(copy: Path) -> None:
    config = copy / "config.json"
    config.write_text(config.read_text() + " ")
    assert hash_model(copy) != hash_model(DEMO)


def test_folders_without_weights(copy: Path) -> None:
    path = find_weight_files(copy)[0]
    for content in (
        b"",
        b"\0" * 7,
        b"\xff" * 20,
        b"\2" + b"\0" * 7 + b"[]",
        b"\4" + b"\0" * 7 + b"{",
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"safetensors|header"):
            hash_model(copy)
    path.unlink()
    with pytest.raises(ModelError):
        hash_model(copy)


def test_numerics_of_ranks() -> None:
    """Which layers have how many ranks decides, where that differs; how stages are cut does not."""
    one, two = "cpu: bfloat16", "cpu: bfloat16; 2 ranks"
    assert describe_numerics([one, one], [2, 2], [1, 1]) == describe_numerics([one], [4], [1])
    assert describe_numerics([two] * 2, [2, 2], [2, 2]) == describe_numerics([two], [4], [2])
    mixed = [two, two, one]
    first = describe_numerics(mixed, [2, 2], [2, 1])
    assert first == describe_numerics([one, *mixed], [2, 1, 1], [2, 1, 1])
    others = (
        describe_numerics(mixed, [2, 2], [1, 2]),
        describe_numerics(mixed, [3, 1], [2, 1]),
        describe_numerics([one], [4], [1]),
        describe_numerics([two], [4], [2]),
    )
    assert len({first, *others}) == 5


def test_numerics() -> None:
    digests = {hash_numerics(*pair) for pair in (("a", "b"), ("a", "c"), ("b", "b"))}
    assert len(digests) == 3
