"""Names of models: folders, the demo, the hub, and what is said where there is none."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from httpx2 import ConnectTimeout, ReadTimeout
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils._paths import filter_repo_objects

from gllm.config.engine import EngineConfig
from gllm.config.router import RouterConfig
from gllm.engine.preflight import memory_reason, plan_model
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.hub import (
    DEMO,
    public_name,
    require_tokenizer,
    resolve_model,
    resolve_tokenizer,
)
from gllm.models.hub_download import check_space, make_byte_counter
from gllm.models.weight_files import INDEX, SINGLE, find_weight_files
from gllm.options.exit_status import UNAVAILABLE_STATUS, find_exit_status
from gllm.router.fleet_engine import FleetEngine
from gllm.text.tokenizer import Tokenizer
from tests.support.engines.pipeline import Pipeline
from tests.support.models.tiny_models import save
from tests.support.text.tokenizers import byte_level
from tests.support.text.tokenizers import save as save_tokenizer

TOKENIZER = {
    "config.json",
    "tokenizer.json",
    "tekken.json",
    "tiktoken.model",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
}


def test_a_tokenizer_is_a_folder_a_file_or_a_name_on_the_hub(
    tmp_path: Path, hub: "Callable[..., Hub]"
) -> None:
    assert resolve_tokenizer(None, tmp_path) == tmp_path == require_tokenizer(None, tmp_path)
    assert resolve_tokenizer("demo", tmp_path) == DEMO
    file = tmp_path / "tekken.json"
    file.write_text("{}")
    for path in (file, tmp_path):
        assert resolve_tokenizer(str(path), DEMO) == tmp_path == require_tokenizer(str(path), DEMO)
    repository = hub(*TOKENIZER, *COPIES, SINGLE, INDEX, "generation_config.json")
    assert resolve_tokenizer("org/name", DEMO, repository) == repository.folder
    assert repository.fetched == TOKENIZER
    for name in ("/no/such", "./no"):
        with pytest.raises(ModelError, match=f"no tokenizer '{name}'"):
            resolve_tokenizer(name, DEMO)
    with pytest.raises(ModelError, match="'org/name' is not on this machine"):
        require_tokenizer("org/name", DEMO)
    failing = FailingHub(tmp_path, ConnectionError("refused"))
    with pytest.raises(ModelError, match=r"org/name.*cannot be reached"):
        resolve_tokenizer("org/name", DEMO, failing)


async def test_engines_and_routers_use_another_tokenizer(tmp_path: Path) -> None:
    backend = byte_level()
    folder = save_tokenizer(tmp_path, backend, chat_template="{{ messages[0].content }}!")
    plan_model(EngineConfig(tokenizer=str(folder)))
    router = FleetEngine(RouterConfig(hub="0", tokenizer=str(folder)))
    assert router.tokenizer.vocab_size == backend.get_vocab_size()
    assert router.tokenizer.chat_template is not None
    assert router.tokenizer.chat_template.render([{"role": "user", "content": "a"}]) == "a!"
    await router.stop()


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
        self.dry_runs: list[list[str]] = []

    def snapshot_download(
        self,
        name: str,
        *,
        allow_patterns: list[str],
        revision: str | None = None,
        dry_run: bool = False,
        tqdm_class: object = None,
    ) -> Any:
        assert name == "org/name"
        assert revision in (None, "c0ffee")
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = list(filter_repo_objects(self.files, allow_patterns=allow_patterns))
        if dry_run:
            self.dry_runs.append(paths)
            return [
                SimpleNamespace(
                    file_size=len(self.files[path]),
                    will_download=not (self.folder / path).exists(),
                )
                for path in paths
            ]
        for path in paths:
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

    def snapshot_download(self, name: str, **_: Any) -> Any:
        raise self.error


class BreakingHub(Hub):
    """A hub whose download of weights breaks off once."""

    is_broken = True

    def snapshot_download(self, name: str, **options: Any) -> Any:
        is_of_weights = any(path.endswith(".safetensors") for path in options["allow_patterns"])
        if is_of_weights and self.is_broken and not options.get("dry_run"):
            self.is_broken = False
            raise ReadTimeout("timed out")
        return super().snapshot_download(name, **options)


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


EXL2 = {"quantization_config": {"quant_method": "exl2"}}


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"architectures": ["Other"]}, {}, "architectures.*not supported"),
        (EXL2, {}, "quant_method 'exl2' is not implemented"),
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
    with pytest.raises(ModelError, match=r"GGUF.*: model-Q8_0\.gguf"):
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
        (ConnectTimeout("too slow"), r"cannot be reached.*\(too slow\)"),
        (ConnectTimeout(""), r"cannot be reached.*\(ConnectTimeout\)"),
    ],
)
def test_failed_download_says_what_to_do(error: Exception, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        resolve_model("org/name", FailingHub(tmp_path, error))
    is_passing = find_exit_status(caught.value) == UNAVAILABLE_STATUS
    assert is_passing == ("cannot be reached" in said)


def test_a_download_that_broke_off_goes_on(tmp_path: Path) -> None:
    repository = BreakingHub(tmp_path, dict.fromkeys((*SMALL, SINGLE), "{}"))
    with pytest.raises(
        ModelError, match=r"broke off; run the same command again.*timed out"
    ) as caught:
        resolve_model("org/name", repository)
    assert find_exit_status(caught.value) == UNAVAILABLE_STATUS
    assert resolve_model("org/name", repository) == repository.folder
    assert SINGLE in repository.fetched


def test_dense_layers_of_embedding_models_are_weights(hub: "Callable[..., Hub]") -> None:
    small = {"modules.json", "1_Pooling/config.json", "2_Dense/config.json"}
    dense = "2_Dense/model.safetensors"
    repository = hub(*SMALL, *COPIES, *small, SINGLE, dense)
    resolve_model("org/name", repository, has_weights=False)
    assert repository.fetched == SMALL | small
    resolve_model("org/name", repository)
    assert repository.fetched == SMALL | small | {SINGLE, dense}


def test_the_size_of_the_weights_is_checked_before_them(hub: "Callable[..., Hub]") -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    shards = {"model-1.safetensors": "x" * 700, "model-2.safetensors": "x" * 300}
    repository = hub(*SMALL, *COPIES, **{INDEX: json.dumps(index)}, **shards)
    sizes: list[int] = []

    def check_size(num_bytes: int) -> None:
        sizes.append(num_bytes)
        if len(sizes) == 1:
            raise ModelError("too large")

    with pytest.raises(ModelError, match="too large"):
        resolve_model("org/name", repository, check_size=check_size)
    assert repository.dry_runs == [sorted(shards)]
    assert repository.fetched == {*SMALL, INDEX}
    resolve_model("org/name", repository, check_size=check_size)
    # Nothing is missing any more.
    resolve_model("org/name", repository, check_size=check_size)
    assert sizes == [1000, 1000]


def test_weights_that_do_not_fit_on_the_disk_are_not_fetched(tmp_path: Path) -> None:
    files: list[Any] = [
        SimpleNamespace(file_size=3 * 10**9, will_download=True),
        SimpleNamespace(file_size=9 * 10**9, will_download=False),
        SimpleNamespace(file_size=None, will_download=True),
    ]
    check_space("org/name", files, tmp_path, 3 * 10**9)
    with pytest.raises(
        ModelError, match=r"'org/name' need 3\.0 GB more.*has 2\.0 GB free: set HF_HOME"
    ):
        check_space("org/name", files, tmp_path, 2 * 10**9)
    check_space("org/name", files[1:], tmp_path, None)


@pytest.mark.parametrize(
    ("options", "bytes_", "fits"),
    [
        ({}, 100, True),
        ({}, 101, False),
        ({"dtype": "bfloat16"}, 200, True),
        ({"dtype": "bfloat16"}, 202, False),
        ({"quantization": "int8"}, 400, True),
        ({"quantization": "int8"}, 404, False),
        ({"quantization": "int4"}, 800, True),
        ({"quantization": "int4"}, 808, False),
    ],
)
def test_weights_that_certainly_do_not_fit_into_memory(
    options: dict[str, Any], bytes_: int, fits: bool
) -> None:
    reason = memory_reason(bytes_ * 10**9, EngineConfig(**options), 100 * 10**9)
    assert (reason is None) == fits
    assert fits or (reason is not None and "101.0 GB of memory at least, but 100.0 GB" in reason)


def test_progress_counts_megabytes_of_several_bars() -> None:
    """As huggingface_hub makes them: bytes received, bytes written, files."""
    reported: list[int] = []
    bar_class = make_byte_counter(reported.append)
    received, written = (bar_class(total=0, unit="B", desc=text) for text in ("a", "b"))
    num_files = bar_class(total=3, desc="files", unit="it", disable=False)
    for _ in range(3):
        received.update(900_000)
        written.update(1_500_000)
        num_files.update()
    assert reported == [1, 2, 1]
    assert sum(reported) == 4
    for bar in (received, written, num_files):
        bar.close()


def test_configuration_is_read_without_torch() -> None:
    modules = "gllm.models.config, gllm.models.hub, gllm.models.split, gllm.runtime.worker.device"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
