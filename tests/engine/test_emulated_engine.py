"""Reports of an engine with emulated devices, without processes."""

from pathlib import Path

import pytest

from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine


async def test_devices_are_those_of_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPUs of the machine do nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig.from_options(
        "qwen2.5-7b",
        device="emulated:L20,A100-80G",
        pipeline_parallel_size=2,
        tensor_parallel_size=(1, 2),
        max_model_len=4096,
    )
    engine = Engine(config)
    (report,) = engine.nodes()
    assert report.devices == ["emulated:L20", *["emulated:A100-80G"] * 2]
    slow, fast = engine.describe()["layers"]
    assert slow < fast
    await engine.stop()
