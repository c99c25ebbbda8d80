"""Workload of conversations: shared system prompts, and histories that grow from turn to turn.

The texts of all turns are fixed in advance, those of the assistant too. An engine's own answer
differs from the one in the next turn's history, so a prefix cache has the earlier prompt but not
the answer.
"""

import math
import random
from typing import NamedTuple

SESSIONS = "sessions"
"""Name of the workload."""
PARAMETERS = ("SESSIONS", "TURNS", "PROMPTS", "SYSTEM", "USER", "OUTPUT")
"""Sessions that take turns at one time; turns of each; different system prompts; tokens of a
system prompt, and mean tokens of a user's message and of an answer."""
DEFAULTS = (32, 6, 4, 256, 40, 40)
"""Values of the workload `sessions` without parameters."""


class PromptPart(NamedTuple):
    """Part of a prompt that other prompts may share, such as a system prompt or earlier message."""

    key: int
    """Identity of the part: parts with the same key have the same tokens."""
    num_tokens: int
    is_output: bool = False
    """True for the answer to an earlier prompt, which an engine has in its own words."""


class SessionTurn(NamedTuple):
    """One request of a simulated conversation: prompt with the history, and output length."""

    session: int
    """Number of the conversation."""
    parts: tuple[PromptPart, ...]
    """The system prompt, the earlier messages and answers, the new message."""
    num_output_tokens: int


class _Session:
    """A conversation that has not ended."""

    def __init__(self, number: int, system_prompt: PromptPart) -> None:
        self.number = number
        self.num_turns = 0
        self.parts = [system_prompt]


def is_sessions(workload: str) -> bool:
    """Return True if a workload consists of conversations: `sessions` or `sessions:...`."""
    return workload.partition(":")[0] == SESSIONS


def parse_sessions(workload: str) -> tuple[int, ...]:
    """Parse the parameters of a workload of conversations, such as `sessions:32,6,4,256,40,40`.

    Returns:
        The numbers of concurrent conversations, requests of each, and different system prompts;
        tokens of a system prompt, and mean tokens of a user message and of an answer. `sessions`
        alone has default values.

    Raises:
        ValueError: The parameters are not whole numbers of at least 1.
    """
    return parse_parameters(workload, PARAMETERS, DEFAULTS)


def parse_parameters(
    workload: str, names: tuple[str, ...], defaults: tuple[int, ...]
) -> tuple[int, ...]:
    """Parse the parameters of a workload, such as `sessions:32,6,4,256,40,40`.

    Args:
        workload: Its name, a colon and the values; the name alone has default values.
        names: Names of the parameters.
        defaults: Their default values.

    Raises:
        ValueError: The parameters are not whole numbers of at least 1.
    """
    name, colon, text = workload.partition(":")
    if not colon:
        return defaults
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:
        values = ()
    if len(values) != len(names) or min(values) < 1:
        raise ValueError(
            f"workload {workload!r}: {name} takes {','.join(names)}, whole numbers of at "
            f"least 1, as in {name}:{','.join(map(str, defaults))}"
        )
    return values


def sample_turns(workload: str, count: int, seed: int) -> list[SessionTurn]:
    """Sample the requests of simulated conversations, in order of arrival.

    Each request continues a random one of the open conversations. A conversation that has had all
    its requests is replaced by a new one. Lengths of messages and answers are uniform between 0.5
    and 1.5 times their mean.

    Args:
        workload: `sessions`, or with parameters as for `parse_sessions`.
        count: Number of requests.
        seed: Seed of the random numbers.

    Raises:
        ValueError: The parameters are invalid.
    """
    num_open, num_turns, num_prompts, system, user, output = parse_sessions(workload)
    rng = random.Random(seed)
    keys = iter(range(num_prompts, num_prompts + 2 * count))
    prompts = [PromptPart(key, system) for key in range(num_prompts)]
    sessions: list[_Session] = []
    turns = []
    num_sessions = 0
    for _ in range(count):
        if len(sessions) < num_open:
            sessions.append(_Session(num_sessions, rng.choice(prompts)))
            num_sessions += 1
        session = rng.choice(sessions)
        session.parts.append(PromptPart(next(keys), sample_around(rng, user)))
        num_output_tokens = sample_around(rng, output)
        turns.append(SessionTurn(session.number, tuple(session.parts), num_output_tokens))
        session.parts.append(PromptPart(next(keys), num_output_tokens))
        session.num_turns += 1
        if session.num_turns == num_turns:
            sessions.remove(session)
    return turns


def sample_around(rng: random.Random, mean: int) -> int:
    """Sample a length in tokens, uniform between 0.5 and 1.5 times the mean, at least 1."""
    return rng.randint(max(1, math.ceil(mean / 2)), mean + mean // 2)
