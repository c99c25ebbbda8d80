"""What `gllm chat` prints and remembers of an answer."""

from typing import Any

import pytest

from gllm.commands.chat import ChatClient, main, print_answer
from gllm.deploy.server_client import ServerClient, ServerError


class Spoken:
    """A client whose server says what it was given."""

    def __init__(self, *deltas):
        self._deltas = deltas

    def stream(self, history):
        for delta in self._deltas:
            yield {"choices": [{"delta": delta}], "usage": {"completion_tokens": 1}}


def test_reasoning_is_printed_and_forgotten(capsys):
    thoughts = [{"reasoning": "hm, ", "reasoning_content": "hm, "}, {"reasoning": "yes"}]
    said = [
        {"role": "assistant", "content": ""},
        *thoughts,
        {},
        {"content": "A "},
        {"content": "fox."},
    ]
    client: Any = Spoken(*said)
    assert print_answer(client, []) == "A fox."
    assert capsys.readouterr().out == "hm, yes\n\nA fox.\n"
    client = Spoken(said[0], *said[4:])
    assert print_answer(client, []) == "A fox."
    assert capsys.readouterr().out == "A fox.\n"


@pytest.mark.parametrize("url", ["nonsense", "http://[::1", "file:///etc/passwd", ""])
def test_urls_that_cannot_be(url, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--url", url])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--url" in line
    with pytest.raises(ServerError):
        ChatClient(ServerClient(url), {}).model()


def test_a_key_that_no_header_holds(capsys):
    assert main(["--url", "http://127.0.0.1:9", "--api-key", "schl\u00fcssel"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--api-key" in line


@pytest.mark.parametrize("chunk", [{"choices": 5}, {"choices": [{}]}, {}, {"choices": [None]}])
def test_a_server_of_another_api(chunk):
    class Other:
        def stream(self, history):
            yield chunk

    client: Any = Other()
    with pytest.raises(ServerError, match="does not follow OpenAI's API"):
        print_answer(client, [])
