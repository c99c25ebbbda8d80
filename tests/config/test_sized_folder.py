"""Values FOLDER:SIZE: what they say, and their refusals at the border."""

from pathlib import Path

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.sized_folder import SizedFolder, check_sized_folder, parse_sized_folder
from gllm.options.field_types import FieldError


@pytest.mark.parametrize(
    ("text", "folder", "max_bytes"),
    [
        ("/var/cache/gllm", "/var/cache/gllm", None),
        ("/dev/shm/gllm:20GiB", "/dev/shm/gllm", 20 * 2**30),
        ("/a:1.5 GB", "/a", 1_500_000_000),
        ("/a:1048576", "/a", 2**20),
        ("/a:b/c", "/a:b/c", None),
        ("/models:v2/cache:2MiB", "/models:v2/cache", 2**21),
        ("cache/x:2MiB", f"{Path.cwd()}/cache/x", 2**21),
    ],
)
def test_folder_and_size(text: str, folder: str, max_bytes: int | None) -> None:
    parsed = parse_sized_folder(text)
    assert parsed == SizedFolder(Path(folder), max_bytes)
    assert parse_sized_folder(str(parsed)) == parsed
    if max_bytes is None:
        with pytest.raises(ValueError, match="has to be FOLDER:SIZE"):
            parse_sized_folder(text, needs_size=True)


@pytest.mark.parametrize("name", ["weight_cache", "kv_cache_disk"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' has to be FOLDER"),
        (":20GiB", "':20GiB' has to be FOLDER"),
        ("/a:20G", "'20G' is not a size: give one such as 20GiB"),
        ("/a:1.2.3GB", "is not a size"),
        ("/a:20", "the size 20 is less than a MiB"),
        ("/a:-5", "the size -5 is less than a MiB"),
    ],
)
def test_invalid_values_are_refused_with_the_fix(name: str, text: str, reason: str) -> None:
    with pytest.raises(FieldError, match=f"{name}: .*{reason}") as info:
        EngineConfig.from_options("demo", **{name: text})
    assert info.value.param == name


def test_a_relative_folder_is_that_of_the_command() -> None:
    """Workers and gllm-link have other working directories."""
    config = EngineConfig(weight_cache="cache", kv_cache_disk="disk:1GiB")
    assert config.weight_cache == f"{Path.cwd()}/cache"
    assert config.kv_cache_disk == f"{Path.cwd()}/disk:{2**30}"


def test_a_folder_that_cannot_be_is_refused_on_the_command_line(tmp_path: Path) -> None:
    check = check_sized_folder()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a folder"):
        check(f"{tmp_path}/file/cache:2GiB")
    assert check(f"{tmp_path}/new/cache:2GiB") == f"{tmp_path}/new/cache:2GiB"
