"""--kv-cache-disk: folder and size, and what it cannot be."""

from pathlib import Path

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.sized_folder import SizedFolder, parse_sized_folder
from gllm.options.field_types import FieldError
from gllm.scheduler.config import SchedulerConfig
from tests.config.test_kv_transfer import parse


def test_the_flag_names_a_folder_and_its_size(tmp_path: Path) -> None:
    config = parse("--kv-cache-disk", f"{tmp_path}/a:b:1.5GiB")
    assert config.kv_cache_disk is not None
    expected = SizedFolder(tmp_path / "a:b", 3 * 2**29)
    assert parse_sized_folder(config.kv_cache_disk, needs_size=True) == expected
    assert config.has_kv_mover
    assert config.kv_transfer is None
    assert parse().kv_cache_disk is None
    assert not parse().has_kv_mover


@pytest.mark.parametrize("value", ["/tmp/x", "/tmp/x:many"])
def test_a_value_without_a_size_is_refused(value: str) -> None:
    with pytest.raises(FieldError, match=r"kv_cache_disk: .* has to be FOLDER:SIZE"):
        EngineConfig(kv_cache_disk=value)


def test_the_flag_refuses_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        parse("--kv-cache-disk", f"{tmp_path}/file/folder:1GiB")
    assert "is not a folder" in capsys.readouterr().err


def test_devices_and_caches_without_blocks_for_it_are_refused() -> None:
    for device in ("cuda", "emulated"):
        with pytest.raises(FieldError, match="set device to cpu"):
            EngineConfig(kv_cache_disk="/tmp/x:1GiB", device=device)
    with pytest.raises(FieldError, match="turn prefix_cache on"):
        EngineConfig(kv_cache_disk="/tmp/x:1GiB", scheduler=SchedulerConfig(prefix_cache=False))
