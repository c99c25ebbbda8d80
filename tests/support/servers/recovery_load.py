"""Requests of all kinds at once, and what their clients get, for the tests of recoveries."""

import json
import threading
import time
import urllib.error
from dataclasses import dataclass, field
from typing import Any

from gllm.kernels.native.builds import select_build
from tests.support.servers.server import Server, wait_until

HAS_EXACT_TEXTS = select_build().path is not None
"""False if a BLAS decides the order of sums, so that recomputed texts may differ."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Part = tuple[str | int, ...]
"""Place of a value in an answer."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 8, "maxLength": 30},
        "friends": {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 5},
    },
    "required": ["name", "friends"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "remember",
        "parameters": {
            "type": "object",
            "properties": {"story": {"type": "string", "minLength": 60, "maxLength": 120}},
            "required": ["story"],
            "additionalProperties": False,
        },
    },
}
LONG_PROMPT = "Once upon a time there lived a fox who knew every path of the old forest. " * 6
DRAWN = {"temperature": 1.0, "top_p": 0.95}


def say(text: str) -> dict[str, Any]:
    """The messages of a chat."""
    return {"messages": [{"role": "user", "content": text}]}


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": "The owl said", "temperature": 0, "ignore_eos": True}),
    "seeded": (COMPLETIONS, {"prompt": "A fox", "seed": 7, "ignore_eos": True, **DRAWN}),
    "penalties": (
        COMPLETIONS,
        {
            "prompt": "Deep in the forest",
            "seed": 8,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.7,
            "ignore_eos": True,
            **DRAWN,
        },
    ),
    "logit bias": (
        COMPLETIONS,
        {"prompt": "My name", "seed": 9, "logit_bias": {"40": 3, "50": -100}, "ignore_eos": True},
    ),
    "grammar": (
        CHAT,
        {
            **say("Tell me about Otto the fox."),
            "seed": 10,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "animal", "schema": SCHEMA},
            },
        },
    ),
    "tool call": (
        CHAT,
        {**say("Remember this story."), "seed": 11, "tools": [TOOL], "tool_choice": "required"},
    ),
    "logprobs": (
        COMPLETIONS,
        {"prompt": "It rained", "seed": 12, "logprobs": 3, "ignore_eos": True, **DRAWN},
    ),
    "chat logprobs": (
        CHAT,
        {**say("Who are you?"), "seed": 13, "logprobs": True, "top_logprobs": 2, "min_tokens": 50},
    ),
    "two choices": (
        COMPLETIONS,
        {"prompt": "Two badgers", "seed": 14, "n": 2, "ignore_eos": True, **DRAWN},
    ),
    "stop strings": (
        COMPLETIONS,
        {"prompt": "The hedgehog", "seed": 15, "stop": ["dark clouds", "zzz"], **DRAWN},
    ),
    "min_tokens": (COMPLETIONS, {"prompt": "The end.", "seed": 16, "min_tokens": 60, **DRAWN}),
    "prompt logprobs": (
        COMPLETIONS,
        {"prompt": "Hares run through snow", "seed": 17, "prompt_logprobs": 2, "ignore_eos": True},
    ),
    "echo": (
        COMPLETIONS,
        {"prompt": "Frogs sing at night", "seed": 19, "echo": True, "logprobs": 2, **DRAWN},
    ),
    "cached prefix": (
        COMPLETIONS,
        {"prompt": LONG_PROMPT, "seed": 18, "ignore_eos": True, **DRAWN},
    ),
}
"""Endpoint and fields by kind of request; greedy or with a seed, so that all have one answer."""
RECOVERY = ["--freeze-timeout", "3", "--recovery-timeout", "300"]
"""Flags with which a stopped worker is left alone for three seconds only, and requests wait for a
restarted worker, however long its start takes here."""
MAX_TOKENS = 90
WHOLE = ("chat logprobs", "prompt logprobs")
"""Kinds whose answers are not streamed."""
JOINED = ("text", "content", "arguments")
"""Texts that come in pieces."""
DIFFERENT = ("id", "created")
"""Fields that differ from answer to answer."""


@dataclass
class Answer:
    """Answer that a client received: values by their place, pieces of one value joined."""

    kind: str
    values: dict[Part, Any] = field(default_factory=dict)
    num_events: int = 0
    longest_gap: float = 0.0
    """Seconds between two events, or from the request to the first one."""
    errors: list[Any] = field(default_factory=list)
    has_ended: bool = False

    def add(self, part: Any, place: Part = ()) -> None:
        """Add an event, or a part of one."""
        if isinstance(part, dict):
            for key, value in part.items():
                if key not in DIFFERENT:
                    self.add(value, (*place, key))
        elif isinstance(part, list):
            if part and isinstance(part[0], dict) and "index" in part[0]:
                for each in part:
                    self.add(each, (*place, each["index"]))
            else:
                self.values[place] = self.values.get(place, []) + part
        elif isinstance(part, str) and place[-1] in JOINED:
            self.values[place] = self.values.get(place, "") + part
        elif part is not None:
            self.values[place] = part

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return self.values["usage", "prompt_tokens_details", "cached_tokens"]

    @property
    def content(self) -> dict[Part, Any]:
        """All but the numbers of cached tokens and of guesses, which depend on what else runs."""
        left_out = "cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"
        return {place: value for place, value in self.values.items() if place[-1] not in left_out}


class Load:
    """All kinds of requests at once, each on a thread of its own."""

    def __init__(self, server: Server, salt: str) -> None:
        """Start the requests; no other load may use the same cache salt."""
        self._server = server
        self._salt = salt
        path, fields = REQUESTS["cached prefix"]
        assert server.post(path, {**fields, "max_tokens": 1, "cache_salt": salt})[0] == 200
        self.answers = {kind: Answer(kind) for kind in REQUESTS}
        self._threads = [
            threading.Thread(target=self.run, args=(answer,), daemon=True)
            for answer in self.answers.values()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_events(self) -> int:
        """Events that the clients have got so far."""
        return sum(answer.num_events for answer in self.answers.values())

    @property
    def is_running(self) -> bool:
        """True until all answers have ended."""
        return not all(answer.has_ended for answer in self.answers.values())

    def wait_for_events(self, number: int) -> None:
        """Wait until the clients have got that many events. Fails if all answers end before."""

        def is_reached() -> bool:
            # An answer counts its events before it ends.
            was_running = self.is_running
            has_events = self.num_events >= number
            errors = {each.kind: each.errors for each in self.answers.values() if each.errors}
            assert has_events or was_running, f"{self.num_events} events of {number}: {errors}"
            return has_events

        wait_until(is_reached)

    def wait(self) -> dict[str, Answer]:
        """Wait for the end of all answers."""
        wait_until(lambda: not self.is_running)
        return self.answers

    def run(self, answer: Answer) -> None:
        """Send the request of an answer's kind and read the answer."""
        path, fields = REQUESTS[answer.kind]
        body = {"max_tokens": MAX_TOKENS, "cache_salt": self._salt, **fields}
        last = time.monotonic()
        try:
            for event in self._events(path, body, is_streamed=answer.kind not in WHOLE):
                answer.num_events += 1
                now = time.monotonic()
                answer.longest_gap, last = max(answer.longest_gap, now - last), now
                if "error" in event:
                    answer.errors.append(event["error"])
                answer.add(event)
        except urllib.error.HTTPError as error:
            answer.errors.append(json.load(error))
        except Exception as error:
            # An answer that ends with any error has ended: nobody sees the errors of a thread.
            answer.errors.append(repr(error))
        finally:
            answer.has_ended = True

    def _events(self, path: str, body: dict[str, Any], is_streamed: bool) -> Any:
        if is_streamed:
            body = {**body, "stream_options": {"include_usage": True}}
            if path == COMPLETIONS:
                body["return_token_ids"] = True
            return self._server.stream(path, body)
        status, answer = self._server.post(path, body)
        return [answer if status == 200 else {"error": answer}]


class RepeatedLoad(Load):
    """All kinds of requests, each sent again whenever its answer has ended, until `stop`."""

    def __init__(self, server: Server, salt: str) -> None:
        """Start the requests; no other load may use the same cache salt."""
        self._all_answers: list[Answer] = []
        self._should_stop = threading.Event()
        super().__init__(server, salt)

    @property
    def num_events(self) -> int:
        """Events that the clients have got so far."""
        return sum(answer.num_events for answer in self._all_answers)

    @property
    def is_running(self) -> bool:
        """True until `stop` is called and all answers have ended, or all with an error."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> list[Answer]:
        """Wait for the end of the answers that run; return all of them."""
        self._should_stop.set()
        self.wait()
        return self._all_answers

    def run(self, answer: Answer) -> None:
        """Send the request of an answer's kind again and again."""
        while True:
            self._all_answers.append(answer)
            super().run(answer)
            if answer.errors or self._should_stop.is_set():
                return
            answer = self.answers[answer.kind] = Answer(answer.kind)


def load_during(server: Server, salt: str) -> Load:
    """Start requests of all kinds and wait until all of them run."""
    load = Load(server, salt)
    load.wait_for_events(2 * len(REQUESTS))
    return load


def wait_until_ready(server: Server) -> None:
    """Wait for the end of a recovery."""
    wait_until(lambda: server.status("/ready") == 200)


def compare(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """Check that no request was lost and that all answers are as expected.

    Texts are compared only where a BLAS does not order their sums.
    """
    for kind, answer in answers.items():
        assert answer.errors == [], kind
        if HAS_EXACT_TEXTS:
            assert answer.content == expected[kind].content, kind
        else:
            assert ends(answer) == ends(expected[kind]) != set(), kind


def ends(answer: Answer) -> set[Part]:
    """Return the places of the reasons for which choices ended."""
    return {place for place in answer.values if place[-1] == "finish_reason"}
