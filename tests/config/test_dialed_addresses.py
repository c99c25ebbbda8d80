"""Addresses that other machines dial: those of no machine are refused at once."""

from collections.abc import Callable

import pytest

from gllm.__main__ import main
from gllm.config.engine import EngineConfig
from gllm.config.join import JoinConfig
from gllm.config.nodes import NodesConfig
from gllm.options.field_types import FieldError

WILDCARDS = ("0.0.0.0:29601", "[::]:29601")
FIELDS: dict[str, Callable[[str], object]] = {
    "kv_transfer_address": lambda text: EngineConfig(kv_transfer="auto", kv_transfer_address=text),
    "advertise": lambda text: NodesConfig(advertise=text),
    "advertise ": lambda text: JoinConfig(advertise=text),
    "master_addr": lambda text: NodesConfig(nnodes=2, master_addr=text),
}


@pytest.mark.parametrize("address", WILDCARDS)
@pytest.mark.parametrize("field", FIELDS)
def test_a_wildcard_is_refused(field: str, address: str) -> None:
    with pytest.raises(FieldError, match=f"{field.strip()}: other machines cannot dial"):
        FIELDS[field](address)
    FIELDS[field]("gpu-1.example:29601")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]:29600"])
def test_a_wildcard_is_no_head(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FieldError, match="set node_listen"):
        NodesConfig(nnodes=2, master_addr=host)
    assert main(["node", "--join", host]) == 2
    assert "give the address that they reach" in capsys.readouterr().err


def test_a_head_may_listen_on_all_addresses() -> None:
    NodesConfig(nnodes=2, master_addr="10.0.0.1", node_listen="0.0.0.0")
