"""What the parent refuses before a worker process is started."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gllm import serve
from gllm.config.engine import EngineConfig
from gllm.engine.preflight import BACKEND_DEVICES, plan_model
from gllm.models.draft_plan import find_draft_obstacle
from gllm.models.hub import DEMO
from gllm.options.field_types import FieldError
from tests.support.models.published import PUBLISHED, read


class Started(AssertionError):
    """Worker processes were made."""


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(stages: int) -> None:
        raise Started(f"{stages} workers were started")

    monkeypatch.setattr(serve, "LocalNode", start)
    monkeypatch.setattr(
        "gllm.commands.server_command.setproctitle.setproctitle", lambda title: None
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pp", "99"], "pipeline_parallel_size is 99, but the model has only"),
        (["--pp", "2", "--layers", "1,2000"], "layers 1,2000 has to"),
        (["--pp", "3", "--layers", "1,2"], "layers (1, 2) has to"),
        (["--tp", "4"], "tensor_parallel_size is 4, but num_attention_heads is 6"),
        (["--pp", "2", "--tp", "1,4"], "tensor_parallel_size is 4, but num_attention_heads is 6"),
        (["--pp", "2", "--tp", "1,2,1"], "tensor_parallel_size (1, 2, 1) has to be one number"),
        (["--max-model-len", "99999999"], "max_model_len is 99999999"),
        (["--kv-transfer", "nixl"], "needs the package nixl: pip install nixl"),
        (["--kv-cache-memory", "4KiB"], "kv_cache_memory is 4096 bytes, but one sequence"),
        (
            ["--device", "cpu", "--attention-backend", "triton"],
            "attention_backend triton does not compute on device cpu: choose native",
        ),
        (["--device", "cuda", "--attention-backend", "native"], "choose flash-attn"),
        (["--model", "/nowhere"], "there is no folder '/nowhere'"),
        (
            ["--speculative-config", '{"method": "mtp"}'],
            "but Qwen3ForCausalLM has none that is implemented",
        ),
        (
            ["--speculative-config", '{"method": "draft_model", "model": "/nowhere"}'],
            "there is no folder '/nowhere'",
        ),
    ],
)
def test_a_configuration_that_the_model_cannot_have(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(flags) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("gllm: ")
    assert words in errors[0]


def draft_folder(folder: Path, **keys: object) -> Path:
    """The demo model with other keys of config.json, without weights."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_with_draft(folder: Path) -> None:
    speculation = {"method": "draft_model", "model": str(folder)}
    plan_model(EngineConfig.from_options("demo", speculative_config=speculation))


def test_a_draft_model_has_the_same_tokens(tmp_path: Path) -> None:
    """Its table of embeddings may have another length."""
    folder = draft_folder(tmp_path, vocab_size=2060)
    plan_with_draft(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[500:502]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(FieldError, match="cannot be the draft model: its tokenizer has other"):
        plan_with_draft(folder)


def test_a_draft_model_has_the_context(tmp_path: Path) -> None:
    folder = draft_folder(tmp_path, max_position_embeddings=512)
    with pytest.raises(FieldError, match=r"its context is 512 tokens, but .* up to 1024"):
        plan_with_draft(folder)


def test_a_draft_model_has_no_recurrent_layers() -> None:
    model = read(PUBLISHED["qwen3-next-80b-a3b"])
    assert "recurrent layers" in str(find_draft_obstacle(model, 100))


def test_a_model_that_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Nothing"]}))
    assert serve.main(["--model", str(tmp_path)]) == 2
    assert "Nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "num_workers"), [("--pp 2", 2), ("--tp 2", 2), ("--pp 2 --tp 6,1", 7)]
)
def test_one_that_can_be_gets_its_workers(flags: str, num_workers: int) -> None:
    with pytest.raises(Started, match=f"{num_workers} workers"):
        serve.main(["demo", *flags.split()])


def test_the_smallest_cache_that_may_be_enough_passes() -> None:
    plan = plan_model(EngineConfig(max_model_len=64))
    entries = [layer.attention.kv_entry for layer in plan.config.model.layers]
    elements = sum(entry.num_elements for entry in entries)
    scales = sum(2 * entry.num_heads for entry in entries)
    for dtype, size in (
        *(("auto", 2 * elements), ("fp8", elements)),
        *(("int8", elements + 4 * scales), ("int8_per_token_head", elements + 4 * scales)),
    ):
        enough = 64 * size
        made = EngineConfig(max_model_len=64, kv_cache_memory=enough, kv_cache_dtype=dtype)
        assert plan_model(made).max_model_len == 64
        less = EngineConfig(max_model_len=64, kv_cache_memory=enough - 1, kv_cache_dtype=dtype)
        with pytest.raises(ValueError, match=f"{enough} at least"):
            plan_model(less)


def test_a_length_without_a_token_of_output_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["demo", "--max-model-len", "1"]) == 2
    assert "set --max-model-len to 2 or more" in capsys.readouterr().err
    assert plan_model(EngineConfig(max_model_len=2)).max_model_len == 2


def test_ranks_that_hold_the_same_kv_head_need_more_memory() -> None:
    enough = {}
    for ranks in (1, 2, 6):
        config = EngineConfig(tensor_parallel_size=(ranks,), max_model_len=64, kv_cache_memory=1)
        with pytest.raises(ValueError, match=r"needs \d+ at least") as caught:
            plan_model(config)
        enough[ranks] = int(str(caught.value).split("needs ")[1].split()[0])
    # The demo model has two KV heads.
    assert enough[2] == enough[1]
    assert enough[6] == 3 * enough[1]


def test_it_loads_no_torch() -> None:
    code = (
        "import sys, gllm.engine.preflight as p; p.plan_model(p.EngineConfig()); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_backends_are_those_of_the_kernels() -> None:
    from gllm.kernels.attention_backends import BACKENDS

    assert {name: backend.devices for name, backend in BACKENDS.items()} == BACKEND_DEVICES
