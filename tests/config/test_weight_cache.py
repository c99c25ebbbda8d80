"""The value of --weight-cache, and its refusals at the border."""

from pathlib import Path

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.weight_cache import WeightCacheOptions, check_weight_cache, parse_weight_cache
from gllm.options.field_types import FieldError


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("/var/cache/gllm", WeightCacheOptions("/var/cache/gllm")),
        ("/dev/shm/gllm:20GiB", WeightCacheOptions("/dev/shm/gllm", 20 * 2**30)),
        ("/a:1.5 GB", WeightCacheOptions("/a", 1_500_000_000)),
        ("/a:1048576", WeightCacheOptions("/a", 2**20)),
        ("/a:b/c", WeightCacheOptions("/a:b/c")),
        ("/models:v2/cache:2MiB", WeightCacheOptions("/models:v2/cache", 2**21)),
    ],
)
def test_folder_and_size(text: str, options: WeightCacheOptions) -> None:
    assert parse_weight_cache(text) == options


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cache", "'cache' is not an absolute path: give one"),
        ("", "'' is not an absolute path"),
        ("cache:20GiB", "'cache' is not an absolute path"),
        ("/a:20G", "'20G' is not a size: give one such as 20GiB"),
        ("/a:1.2.3GB", "is not a size"),
        ("/a:20", "the size 20 is less than a MiB"),
    ],
)
def test_invalid_values_are_refused_with_the_fix(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_weight_cache(text)
    with pytest.raises(FieldError, match=f"weight_cache: .*{reason}") as info:
        EngineConfig.from_options("demo", weight_cache=text)
    assert info.value.param == "weight_cache"


def test_a_folder_that_cannot_be_is_refused_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a folder"):
        check_weight_cache(f"{tmp_path}/file/cache:2GiB")
    assert check_weight_cache(f"{tmp_path}/new/cache:2GiB") == f"{tmp_path}/new/cache:2GiB"
