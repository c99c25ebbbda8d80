"""Ports that are bound after a slow start are claimed at its begin, and addresses are printed."""

import ast
import re
import socket
from collections.abc import Callable

import pytest

from gllm import serve
from gllm.commands import router
from gllm.options.exit_status import UNAVAILABLE_STATUS
from gllm.options.ports import check_port_is_free
from tests.support.sources import name_of, sources, text_of, tree_of


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_of_another_program_is_said_with_its_flag(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as other:
        port = other.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with pytest.raises(OSError, match=rf"--hub {re.escape(address)}: another program listens"):
            check_port_is_free("--hub", address)
        if host == "127.0.0.1":
            with pytest.raises(OSError, match=rf"--hub {port}: .*ss -ltnp 'sport = :{port}'"):
                check_port_is_free("--hub", str(port))
    check_port_is_free("--hub", address)


@pytest.mark.parametrize("address", ["0", "127.0.0.1:0", "192.0.2.1:29700", "no.such.host:1", "x"])
def test_other_errors_are_left_to_the_one_who_binds_the_address(address: str) -> None:
    check_port_is_free("--hub", address)


@pytest.mark.parametrize(
    ("main", "flags"),
    [
        (router.main, ["--hub"]),
        (serve.main, ["--hub"]),
        (serve.main, ["--nnodes", "2", "--pp", "2", "--node-rank", "0", "--master-addr"]),
        (serve.main, ["--nnodes", "2", "--pp", "2", "--node-rank", "0", "--node-listen"]),
    ],
)
def test_a_taken_port_ends_a_start_before_the_model_is_looked_at(
    main: Callable[[list[str]], int], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        more = ["--master-addr", "127.0.0.1:1"] if flags[-1] == "--node-listen" else []
        assert main(["/no/such/model", *flags, address, *more]) == UNAVAILABLE_STATUS
    assert f"{flags[-1]} {address}: another program listens there" in capsys.readouterr().err


def test_addresses_of_hosts_are_printed_by_one_function() -> None:
    """It puts IPv6 addresses in brackets: http://[::]:8000, not http://:::8000."""
    found = {
        name_of(path): texts
        for path in sources("gllm")
        if re.search(r"\}:\{", text_of(path)) and (texts := unbracketed_addresses(tree_of(path)))
    }
    assert found == {"gllm/options/addresses.py": ["{host}:{port}"]}


def unbracketed_addresses(tree: ast.AST) -> list[str]:
    """Return the parts of f-strings that join a host and a port with a colon."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        for host, colon, port in zip(node.values, node.values[1:], node.values[2:], strict=False):
            if (
                isinstance(host, ast.FormattedValue)
                and isinstance(colon, ast.Constant)
                and colon.value == ":"
                and isinstance(port, ast.FormattedValue)
            ):
                names = ast.unparse(host.value), ast.unparse(port.value)
                if "port" in names[1] and "host" in names[0] and "format" not in names[0]:
                    found.append(f"{{{names[0]}}}:{{{names[1]}}}")
    return found
