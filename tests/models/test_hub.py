"""Names of models: folders, the demo, the hub, and what is said where there is none."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects

from gllm.config.engine import EngineConfig
from gllm.engine.preflight import plan_model
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.hub import DEMO, public_name, resolve_model
from gllm.models.weight_files import INDEX, SINGLE, find_weight_files
from gllm.options.exit_status import UNAVAILABLE_STATUS, find_exit_status
from gllm.text.tokenizer import Tokenizer
from tests.support.engines.pipeline import Pipeline
from tests.support.models.tiny_models import save
from tests.support.text.tokenizers import byte_level


def test_folders_and_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model("demo") == DEMO
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")


def test_the_public_name_of_a_folder_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my-model"
    (folder / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(folder)
    for path in (str(folder), f"{folder}/", ".", "../my-model", "./org/.."):
        assert public_name(path) == "my-model"
    assert [public_name(name) for name in ("demo", "org/name", "org/other")] == [
        "demo",
        "name",
        "org/other",
    ]
    assert public_name("/") == "/"


@pytest.mark.parametrize("path", ["/no/such", "./no", "../no", "a/b/c"])
def test_missing_path_is_not_looked_up(path: str) -> None:
    with pytest.raises(ModelError, match="no folder"):
        resolve_model(path)


class Hub:
    """A repository on the hub with files of these names and contents, and what is fetched of it."""

    def __init__(self, root: Path, files: dict[str, str]) -> None:
        self.folder = root / "snapshots" / "c0ffee"
        self.files = files
        self.fetched: set[str] = set()

    def snapshot_download(
        self, name: str, *, allow_patterns: list[str], revision: str | None = None
    ) -> str:
        assert name == "org/name"
        assert revision in (None, "c0ffee")
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in filter_repo_objects(self.files, allow_patterns=allow_patterns):
            self.fetched.add(path)
            (self.folder / path).parent.mkdir(exist_ok=True)
            (self.folder / path).write_text(self.files[path])
        return str(self.folder)

    def list_repo_files(self, name: str, *, revision: str | None = None) -> list[str]:
        return list(self.files)


class FailingHub(Hub):
    """A hub whose downloads raise an error."""

    def __init__(self, root: Path, error: Exception) -> None:
        super().__init__(root, {})
        self.error = error

    def snapshot_download(
        self, name: str, *, allow_patterns: list[str], revision: str | None = None
    ) -> str:
        raise self.error


@pytest.fixture
def hub(tmp_path: Path) -> Callable[..., Hub]:
    def make(*names: str, **contents: str) -> Hub:
        return Hub(tmp_path, dict.fromkeys(names, "{}") | contents)

    return make


SMALL = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "qwen.tiktoken",
    "chat_template.jinja",
}
COPIES = (
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "original/params.json",
    "onnx/model.onnx",
    "onnx/config.json",
    "metal/model.safetensors",
    "model.fp16.safetensors",
    "pytorch_model.bin",
    "flax_model.msgpack",
    "params.json",
    "x-Q4_K_M.gguf",
    "README.md",
    "original/model.safetensors.index.json",
    "old/tokenizer.json",
    "README.md",
)


def test_weights_are_fetched_by_the_index(hub: Callable[..., Hub]) -> None:
    """And no copies beside it: they would be as large again."""
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    shards = {"model-1.safetensors", "model-2.safetensors"}
    template = "additional_chat_templates/tool_use.jinja"
    repository = hub(
        *SMALL, *COPIES, *shards, template, **{"model.safetensors.index.json": json.dumps(index)}
    )
    assert resolve_model("org/name", repository) == repository.folder
    index_name = "model.safetensors.index.json"
    assert repository.fetched == SMALL | shards | {template, index_name}


@pytest.mark.parametrize("index", [True, False])
def test_a_refused_model_has_no_weight_fetched(hub: Callable[..., Hub], index: bool) -> None:
    content = {INDEX: json.dumps({"weight_map": {"a": "x.safetensors"}})} if index else {}
    repository = hub(*SMALL, "x.safetensors", SINGLE, **content)
    seen: list[set[str]] = []

    def check(folder: Path) -> None:
        seen.append({path.name for path in folder.iterdir()})
        raise ValueError("not served")

    with pytest.raises(ValueError, match="not served"):
        resolve_model("org/name", repository, check)
    assert seen == [SMALL | content.keys()]
    assert repository.fetched == SMALL | content.keys()
    # One that is in the cache was checked before.
    resolve_model("org/name", repository)
    resolve_model("org/name", repository, check)
    assert len(seen) == 1


AWQ = {"quantization_config": {"quant_method": "awq"}}


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"architectures": ["Other"]}, {}, "architectures.*not supported"),
        (AWQ, {}, "quant_method 'awq' is not implemented"),
        ({}, {"max_model_len": 10**9}, "max_model_len"),
        ({}, {"pipeline_parallel_size": 64}, "layers"),
        ({}, {}, r"no tokenizer\.json"),
        ({}, {"with_tokenizer": True}, None),
    ],
)
def test_all_else_is_checked_before_the_weights(
    changes: dict[str, Any],
    options: dict[str, Any],
    said: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `gllm serve` does; the last row passes and fetches weights."""
    import huggingface_hub

    config = json.loads((DEMO / "config.json").read_text())
    contents = {"config.json": json.dumps(config | changes)}
    if options.pop("with_tokenizer", False):
        contents["tokenizer.json"] = (DEMO / "tokenizer.json").read_text()
    repository = Hub(tmp_path, contents | {SINGLE: "weights"})
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: repository)
    config = EngineConfig(model="org/name", **options)
    refused = pytest.raises((ModelError, ValueError, FileNotFoundError), match=said)
    with refused if said is not None else nullcontext():
        plan_model(config)
    assert (SINGLE in repository.fetched) == (said is None)


def test_the_only_file_is_fetched(hub: Callable[..., Hub]) -> None:
    repository = hub(*SMALL, *COPIES, "model.safetensors")
    assert resolve_model("org/name", repository) == repository.folder
    assert repository.fetched == SMALL | {"model.safetensors"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-Q4_K_M.gguf", "GGUF"),
        ("pytorch_model.bin", "pickle"),
        ("README.md", r"no model\.safetensors"),
    ],
)
def test_repositories_without_weights_are_told_apart(
    hub: Callable[..., Hub], name: str, said: str
) -> None:
    repository = hub(*SMALL, name)
    with pytest.raises(ModelError, match=f"org/name.*{said}"):
        resolve_model("org/name", repository)


def test_a_folder_of_gguf_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "model-Q8_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"no config\.json.*GGUF"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="is a GGUF file"):
        resolve_model(str(tmp_path / "model-Q8_0.gguf"))
    with pytest.raises(ModelError, match="GGUF"):
        find_weight_files(tmp_path)


def load_all(folder: Path) -> None:
    Tokenizer.load(folder)
    Pipeline(folder)


POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\n"
)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
)
def test_git_lfs_pointers_are_named(name: str, tmp_path: Path) -> None:
    folder = save("qwen2", tmp_path)
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / name).write_text(POINTER)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} is a git-lfs pointer.*git lfs pull"):
        load_all(folder)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached"),
        (HFValidationError("bad name"), "neither a folder nor a name"),
        (ConnectionError("refused"), "cannot be reached"),
    ],
)
def test_failed_download_says_what_to_do(error: Exception, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        resolve_model("org/name", FailingHub(tmp_path, error))
    is_passing = find_exit_status(caught.value) == UNAVAILABLE_STATUS
    assert is_passing == ("cannot be reached" in said)


def test_configuration_is_read_without_torch() -> None:
    modules = "gllm.models.config, gllm.models.hub, gllm.models.split, gllm.runtime.worker.device"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
