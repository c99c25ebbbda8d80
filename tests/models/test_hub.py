"""Names of models: folders, the demo, the hub, and what is said where there is none."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from gllm.models.errors import ModelError
from gllm.models.hub import DEMO, resolve


def test_folders_and_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("demo") == DEMO
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")


@pytest.mark.parametrize("path", ["/no/such", "./no", "../no", "a/b/c"])
def test_missing_path_is_not_looked_up(path: str) -> None:
    with pytest.raises(ModelError, match="no folder"):
        resolve(path)


def test_only_what_is_needed_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/name") == tmp_path
    assert asked["name"] == "org/name"
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached"),
        (HFValidationError("bad name"), "neither a folder nor a name"),
        (ConnectionError("refused"), "cannot be reached"),
    ],
)
def test_failed_download_says_what_to_do(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=said):
        resolve("org/name")


def test_configuration_is_read_without_torch() -> None:
    modules = "gllm.models.config, gllm.models.hub, gllm.models.split, gllm.runtime.device"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
