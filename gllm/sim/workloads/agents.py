"""Workload of agents: conversations whose next turn comes a pause after the end of the one before.

An agent calls a tool, waits for its result and sends the whole history again. The load is a closed
loop: the arrival of a turn depends on when the server has answered the last one.
"""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

from gllm.sim.workloads.sessions import PromptPart, parse_parameters, sample_around

AGENTS = "agents"
"""Name of the workload."""
PARAMETERS = ("AGENTS", "TURNS", "SYSTEM", "TASK", "RESULT", "OUTPUT")
"""Agents, turns of each; tokens of the system prompt that all agents share; mean tokens of an
agent's own first message, of a tool's result, and of an answer."""
DEFAULTS = (40, 10, 1000, 2000, 1500, 150)
"""Values of the workload `agents` without parameters."""
DEFAULT_PAUSES = "lognormal:8,30"
AGENTS_HELP = (
    f"{AGENTS} or {AGENTS}:{','.join(PARAMETERS)}: agents whose turns follow each other after "
    "pauses"
)
PAUSES_HELP = (
    "seconds between the end of a turn and the next turn of an agent: fixed:S, uniform:LOW,HIGH, "
    "exponential:MEAN, lognormal:MEDIAN,P90; joined by | for one of them in each pause, such as "
    "fixed:5|fixed:5|exponential:300; by / for agents that differ, in turns"
)


class AgentTurn(NamedTuple):
    """One request of an agent."""

    session: int
    """Number of the agent."""
    turn: int
    """Number of the turn, from 0."""
    parts: tuple[PromptPart, ...]
    """The system prompt, the task, and an answer and a tool's result per earlier turn."""
    num_output_tokens: int
    pause_seconds: float
    """Time from the end of the turn before to the arrival; 0 for the first turn."""


Sampler = Callable[[random.Random], float]


def is_agents(workload: str) -> bool:
    """Return True if a workload consists of agents: `agents` or `agents:...`."""
    return workload.partition(":")[0] == AGENTS


def parse_agents(workload: str) -> tuple[int, ...]:
    """Parse the parameters of a workload of agents, such as `agents:40,10,1000,2000,1500,150`.

    Returns:
        The values in the order of PARAMETERS.

    Raises:
        ValueError: The parameters are not whole numbers of at least 1.
    """
    return parse_parameters(workload, PARAMETERS, DEFAULTS)


def parse_pauses(text: str) -> list[list[Sampler]]:
    """Parse the distributions of agents' pauses in the syntax of PAUSES_HELP.

    Returns:
        The distributions of each kind of agent; a pause is sampled from a random one of them.

    Raises:
        ValueError: A distribution is unknown, or its values are not finite numbers of at least 0.
    """
    return [[_parse_pause(part) for part in kind.split("|")] for kind in text.split("/")]


def _parse_pause(text: str) -> Sampler:
    name, _, numbers = text.strip().partition(":")
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    if values and all(0 <= value < math.inf for value in values):
        match name, values:
            case "fixed", [seconds]:
                return lambda rng: seconds
            case "uniform", [low, high] if low <= high:
                return lambda rng: rng.uniform(low, high)
            case "exponential", [mean] if mean > 0:
                return lambda rng: rng.expovariate(1 / mean)
            case "lognormal", [median, p90] if 0 < median <= p90:
                sigma = math.log(p90 / median) / 1.2816
                return lambda rng: rng.lognormvariate(math.log(median), sigma)
    raise ValueError(
        f"pauses {text!r}: choose fixed:S, uniform:LOW,HIGH, exponential:MEAN or "
        "lognormal:MEDIAN,P90, with seconds of at least 0"
    )


def sample_agent_turns(workload: str, pauses: str, seed: int) -> list[list[AgentTurn]]:
    """Sample the turns of each agent.

    Lengths of messages and answers are uniform between 0.5 and 1.5 times their mean.

    Args:
        workload: `agents`, or with parameters as for `parse_agents`.
        pauses: Distributions of pauses in the syntax of PAUSES_HELP.
        seed: Seed of the random numbers.

    Raises:
        ValueError: The parameters or the pauses are invalid.
    """
    num_agents, num_turns, system, task, result, output = parse_agents(workload)
    kinds = parse_pauses(pauses)
    system_prompt = PromptPart(0, system)
    key, agents = 1, []
    for number in range(num_agents):
        # Each agent has random numbers of its own: other pauses do not change the lengths.
        lengths, times = random.Random(f"{seed} {number}"), random.Random(f"pauses {seed} {number}")
        parts, turns = [system_prompt], []
        for turn in range(num_turns):
            parts.append(PromptPart(key, sample_around(lengths, result if turn else task)))
            num_output_tokens = sample_around(lengths, output)
            sampler = times.choice(kinds[number % len(kinds)])
            pause = sampler(times) if turn else 0.0
            turns.append(AgentTurn(number, turn, tuple(parts), num_output_tokens, pause))
            parts.append(PromptPart(key + 1, num_output_tokens, is_output=True))
            key += 2
        agents.append(turns)
    return agents
