"""Routers of emulated engines: their model needs no weights, and equals that of the engines."""

import json
from pathlib import Path

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.router import RouterConfig
from gllm.engine.preflight import plan_model
from gllm.models.errors import ModelError
from gllm.models.hub import DEMO
from gllm.models.identity import hash_model
from gllm.options.field_types import FieldError
from gllm.router.fleet_engine import FleetEngine
from gllm.runtime.emulation.model_folder import resolve_served_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_config_folder(tmp_path: Path) -> str:
    """A folder with a config.json, without weights and tokenizer."""
    folder = tmp_path / "mine"
    folder.mkdir()
    raw = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"max_position_embeddings": 8192}))
    return str(folder)


@pytest.mark.parametrize("is_folder", [False, True])
async def test_router_and_engines_have_the_same_model(tmp_path: Path, is_folder: bool) -> None:
    model = make_config_folder(tmp_path) if is_folder else "qwen2.5-32b"
    router = FleetEngine(RouterConfig(model, hub="0", device="emulated"))
    plan = plan_model(EngineConfig(model, 4, device="emulated:L20"))
    assert resolve_served_model(model, "emulated:A100-80G") == plan.folder
    assert len(hash_model(plan.folder)) == 64
    assert router.model.name == ("mine" if is_folder else "qwen2.5-32b")
    assert router.model.max_model_len == plan.max_model_len
    await router.stop()


def test_other_devices_need_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a model that only gllm simulate knows names the device."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="it is served on --device emulated alone"):
        resolve_served_model("qwen2.5-32b", "auto")
    with pytest.raises(ModelError) as caught:
        resolve_served_model("no-such-model", "auto")
    assert "emulated" not in str(caught.value)


def test_a_router_has_no_other_devices() -> None:
    with pytest.raises(FieldError, match=r"device.*one of auto, emulated"):
        RouterConfig(device="cuda")
