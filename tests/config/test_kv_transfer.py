"""--kv-transfer: backends by name, without a value, in files; and what it cannot be."""

from pathlib import Path

import pytest

from gllm.config.engine import EngineConfig
from gllm.options.field_types import FieldError
from gllm.options.flags import config_from_flags
from gllm.serve import make_parser


def parse(*arguments: str) -> EngineConfig:
    config = config_from_flags(EngineConfig, make_parser().parse_args(arguments))
    assert isinstance(config, EngineConfig)
    return config


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ((), None),
        (("--kv-transfer",), "auto"),
        (("--kv-export",), "auto"),
        (("--kv-transfer", "--pp", "2"), "auto"),
        (("--kv-transfer", "tcp"), "tcp"),
        (("--kv-transfer-config=shm",), "shm"),
        (("--kv-transfer", "nixl"), "nixl"),
        (("--kv-transfer", "mock:25"), "mock:25"),
    ],
)
def test_the_flag_names_a_backend_or_lets_gllm_choose(
    arguments: tuple[str, ...], backend: str | None
) -> None:
    config = parse(*arguments)
    assert config.kv_transfer == backend
    assert config.kv_transfer_encoding == "plain"


@pytest.mark.parametrize(
    ("text", "backend"),
    [("true", "auto"), ("false", None), ("null", None), ("tcp", "tcp"), ("mock:2.5", "mock:2.5")],
)
def test_a_file_switches_it_or_names_a_backend(
    text: str, backend: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(f"kv-transfer: {text}\n")
    assert parse("--config", str(file)).kv_transfer == backend


@pytest.mark.parametrize(
    "backend", ["", "rdma", "mock:", "mock:0", "mock:-1", "mock:inf", "mock:nan", "mock:x"]
)
def test_unknown_backends_are_named(backend: str) -> None:
    with pytest.raises(FieldError, match=r"kv_transfer: .*GB per second|kv_transfer: .*auto, shm"):
        EngineConfig(kv_transfer=backend)


def test_encodings_are_those_of_links() -> None:
    assert parse("--kv-transfer-encoding", "int8").kv_transfer_encoding == "int8"
    with pytest.raises(FieldError, match="kv_transfer_encoding is 'gzip'"):
        EngineConfig(kv_transfer_encoding="gzip")


@pytest.mark.parametrize(
    ("address", "cause"),
    [
        ("29701", "HOST:PORT"),
        ("host:0", "HOST:PORT"),
        ("0.0.0.0:29701", "cannot dial 0.0.0.0"),
        ("[::]:29701", "cannot dial ::"),
    ],
)
def test_addresses_that_other_machines_cannot_dial(address: str, cause: str) -> None:
    with pytest.raises(FieldError, match=f"kv_transfer_address: .*{cause}"):
        EngineConfig(kv_transfer="auto", kv_transfer_address=address)


def test_an_address_needs_transfers() -> None:
    with pytest.raises(FieldError, match="kv_transfer_address needs kv_transfer"):
        EngineConfig(kv_transfer_address="host:29701")
    assert parse("--kv-transfer", "--kv-transfer-address", "host:29701").kv_transfer == "auto"
