"""What `gllm chat` prints and remembers of an answer."""

from gllm.chat import answer


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
    assert answer(Spoken(*said), []) == "A fox."
    assert capsys.readouterr().out == "hm, yes\n\nA fox.\n"
    assert answer(Spoken(said[0], *said[4:]), []) == "A fox."
    assert capsys.readouterr().out == "A fox.\n"
