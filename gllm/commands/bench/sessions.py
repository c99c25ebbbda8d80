"""`gllm bench sessions`: agents that return after pauses, as they do after calls of tools.

Each agent sends its whole history in every turn, with the server's own answers in it, and pauses
after each answer. The report says how many tokens of earlier turns the server computed again.

Exit status: 0; 1 if no server responds or every request failed; 2 for invalid options; 130 after
Ctrl-C, with a report of the turns finished until then.
"""

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from gllm.commands.bench.client import (
    RequestResult,
    ServedModel,
    TargetServerError,
    open_session,
    request_body,
    run_until_interrupted,
    send,
    wait_until_ready,
)
from gllm.commands.bench.load import PlannedRequest, make_prompt
from gllm.commands.bench.options import RequestConfig
from gllm.commands.bench.report import failure_lines
from gllm.observability.progress import show_progress
from gllm.options.flags import FlagParser, add_flags, config_from_flags, output_file
from gllm.options.options import option
from gllm.sim.metrics.session_turns import TurnResult, summarize_turns, turn_lines
from gllm.sim.workloads.agents import (
    AGENTS,
    AGENTS_HELP,
    DEFAULT_PAUSES,
    PAUSES_HELP,
    AgentTurn,
    is_agents,
    parse_agents,
    parse_pauses,
    sample_agent_turns,
)
from gllm.sim.workloads.requests import sample_arrival_times


@dataclass(frozen=True)
class SessionsConfig(RequestConfig):
    """Options of `gllm bench sessions`: server, agents and report."""

    workload: str = option(AGENTS, AGENTS_HELP)
    pauses: str = option(DEFAULT_PAUSES, f"{PAUSES_HELP} (default {DEFAULT_PAUSES})")
    scale_time: float = option(1.0, "multiplies pauses", ge=0, le=1e9)
    rate: float = option(4.0, "agents that begin per second", gt=0, le=1e9)
    session_header: bool = option(True, "name the agent in the header x-session-id")
    seed: int = option(
        0, "seed of lengths, pauses, prompts and, above temperature 0, sampling", ge=0, le=2**63 - 1
    )
    save_result: str | None = option(None, "JSON file for the result", parse=output_file)
    progress: bool = option(True, "show a progress bar")

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            ValueError: A field is invalid; the message names the field and the fix.
        """
        super().__post_init__()
        if not is_agents(self.workload):
            raise ValueError(
                f"workload is {self.workload!r}, but has to be {AGENTS_HELP}; `gllm bench serve` "
                "has the other workloads"
            )
        parse_agents(self.workload)
        parse_pauses(self.pauses)

    @property
    def request_seed(self) -> int:
        """Seed of all random numbers."""
        return self.seed

    @property
    def request_fields(self) -> Mapping[str, Any]:
        """Additional fields of every request: completions are asked for their token ids."""
        return {} if self.chat else {"return_token_ids": True}


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm bench sessions`."""
    parser = FlagParser(prog="gllm bench sessions", description=(__doc__ or "").splitlines()[0])
    parser.add_config_flag()
    add_flags(parser, SessionsConfig)
    return parser


def main(argv: list[str]) -> int:
    """Run agents against a server; print recomputed tokens and latencies.

    Returns:
        The exit status, as the module says.
    """
    values = make_parser().parse_args(argv)
    try:
        config = config_from_flags(SessionsConfig, values)
        return uvloop.run(_benchmark(config))
    except TargetServerError as error:
        print(f"gllm bench sessions: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"gllm bench sessions: {error}", file=sys.stderr)
        return 2


class AgentHistory:
    """Prompt of an agent: its messages, and the answers that the server gave.

    Args:
        config: Options of single requests.
        seed: Seed of the messages.
        vocab_size: Messages have token ids below it.
    """

    def __init__(self, config: RequestConfig, seed: int, vocab_size: int) -> None:
        self._is_chat = config.chat
        self._seed = seed
        self._vocab_size = None if config.chat else vocab_size
        self._messages: list[dict[str, str]] = []
        self._token_ids: list[int] = []
        self._num_parts = 0

    def extend(self, turn: AgentTurn, answer: RequestResult | None) -> PlannedRequest:
        """Append the answer to the turn before and the messages of a turn; return its request.

        Args:
            turn: The turn.
            answer: Result of the turn before; None for the first turn.
        """
        for part in turn.parts[self._num_parts :]:
            if part.is_output:
                self._append_answer(answer, part.num_tokens, part.key)
                continue
            rng = random.Random(f"{self._seed} {part.key}")
            content = make_prompt(part.num_tokens, rng, self._vocab_size)
            if isinstance(content, str):
                role = "user" if self._messages else "system"
                self._messages.append({"role": role, "content": content})
            else:
                self._token_ids += content
        self._num_parts = len(turn.parts)
        prompt = self._messages if self._is_chat else self._token_ids
        num_tokens = sum(part.num_tokens for part in turn.parts)
        return PlannedRequest(0.0, [*prompt], num_tokens, turn.num_output_tokens)

    def _append_answer(self, answer: RequestResult | None, num_tokens: int, key: int) -> None:
        if self._is_chat:
            text = "".join(answer.text_parts) if answer is not None else ""
            self._messages.append({"role": "assistant", "content": text})
            return
        token_ids = answer.token_ids if answer is not None else []
        if not token_ids:
            # The server sends no ids.
            rng = random.Random(f"{self._seed} {key}")
            token_ids = rng.choices(range(self._vocab_size or 1), k=num_tokens)
        self._token_ids += token_ids


async def _benchmark(config: SessionsConfig) -> int:
    base_url = config.server_url.rstrip("/").removesuffix("/v1")
    api_key = config.api_key or os.environ.get("OPENAI_API_KEY")
    agents = sample_agent_turns(config.workload, config.pauses, config.seed)
    begins = sample_arrival_times("poisson", len(agents), config.rate, config.seed)
    results: list[list[RequestResult]] = [[] for _ in agents]
    async with open_session(config, api_key) as session:
        served = await wait_until_ready(session, base_url, config.model, config.ready_timeout)
        url = base_url + config.endpoint
        begin = time.monotonic()
        num_turns = sum(map(len, agents))
        with show_progress("turn", num_turns, is_shown=config.progress) as bar:

            async def run_agents() -> None:
                async with asyncio.TaskGroup() as group:
                    for turns, delay, own in zip(agents, begins, results, strict=True):
                        agent = _run_agent(
                            config, session, url, served, turns, delay, own, bar.update
                        )
                        group.create_task(agent)

            is_interrupted = await run_until_interrupted(asyncio.ensure_future(run_agents()))
        seconds = time.monotonic() - begin
    return _report(config, served.name, results, seconds, is_interrupted)


async def _run_agent(
    config: SessionsConfig,
    session: aiohttp.ClientSession,
    url: str,
    served: ServedModel,
    turns: list[AgentTurn],
    delay: float,
    results: list[RequestResult],
    on_turn: Any,
) -> None:
    """Send the turns of an agent, after a delay in seconds; it ends with its first failure."""
    history = AgentHistory(config, config.seed, config.vocab_size or served.vocab_size)
    name = f"{AGENTS}-{config.seed}-{turns[0].session}" if config.session_header else ""
    answer: RequestResult | None = None
    await asyncio.sleep(delay)
    for turn in turns:
        if answer is not None:
            await asyncio.sleep(config.scale_time * turn.pause_seconds)
        planned = history.extend(turn, answer)
        body = request_body(config, served.name, turn.turn, planned)
        answer = await send(session, url, body, planned.prompt_tokens, name)
        results.append(answer)
        on_turn()
        if answer.failure:
            return


def _report(
    config: SessionsConfig,
    model: str,
    results: list[list[RequestResult]],
    seconds: float,
    is_interrupted: bool,
) -> int:
    """Print and write the figures; return the exit status."""
    turns = [
        TurnResult(
            str(number),
            result.prompt_tokens,
            result.timeline.num_tokens,
            result.cached_tokens or 0,
            result.timeline.ttft or 0.0,
        )
        for number, own in enumerate(results)
        for result in own
        if not result.failure
    ]
    outcomes = [result for own in results for result in own]
    figures = summarize_turns(turns) | {
        "duration": seconds,
        "completed": len(turns),
        "failed": len(outcomes) - len(turns),
    }
    if is_interrupted:
        print("Interrupted: unfinished turns are not counted.")
    if turns and all(result.cached_tokens is None for result in outcomes):
        print(
            "The server does not say how many prompt tokens were cached: all count as recomputed."
        )
    print(*turn_lines(figures), f"duration: {seconds:.1f} s", sep="\n")
    for line in failure_lines(outcomes):
        print(line, file=sys.stderr)
    if config.save_result:
        options = asdict(config)
        del options["api_key"]
        document = {
            "date": f"{datetime.now(UTC):%Y%m%d-%H%M%S}",
            "model_id": model,
            "configuration": options,
            **figures,
        }
        content = msgspec.json.format(msgspec.json.encode(document), indent=1)
        Path(config.save_result).write_bytes(content + b"\n")
        print(f"wrote {config.save_result}")
    if is_interrupted:
        return 130
    return 0 if turns else 1
