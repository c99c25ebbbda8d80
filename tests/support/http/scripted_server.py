"""A server of the demo model's tokenizer and template whose answers the client writes.

A message that holds `Answer exactly: TEXT` is answered with TEXT. A request with a grammar is
answered with a random text of it, or with TEXT, which then has to fit the grammar: what a probe
gets is what a real engine would let through.

`python -m tests.support.http.scripted_server` serves it for clients in other processes, at port
8471; at the next port the same model is one that may reason.
"""

import argparse
import asyncio
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient
from llguidance import LLMatcher, LLTokenizer

from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.config.server import ServerConfig
from gllm.engine.interface import OutputDelta
from gllm.frontend.app import make_app
from gllm.frontend.connection import ConnectionRunner
from gllm.options.field_types import FieldError
from gllm.text.grammar.compiler_process import _set_bits, compile_grammar
from gllm.text.grammar.sources.structured_output import to_grammar_source
from gllm.text.grammar.vocabulary import load_grammar_tokenizer
from gllm.text.tokenizer import Tokenizer
from tests.frontend.conftest import RealServer, Server
from tests.support.http.fake_engine import FakeEngine, FakeRequest

DEMO = Path(__file__).parents[3] / "gllm" / "demo"
MODEL = "fake/model"
DEFAULT = "Hello wörld 🎉, how are you?"
SCRIPT = re.compile(r"Answer exactly: (.*?)<\|im_end\|>", re.DOTALL)
MAX_TOKENS = 600
"""Length of a text that is made up."""
CLOSING = frozenset('"}],:')


@dataclass
class ScriptedEngine(FakeEngine):
    """Answers with what the prompt says."""

    reply: str = DEFAULT
    max_model_len: int = 4096
    vocabulary: LLTokenizer = field(
        default_factory=cache(lambda: load_grammar_tokenizer(DEMO, 2048, (2,)))
    )

    async def submit(
        self, prompts: Sequence[list[int]], params: SamplingParams, **more: Any
    ) -> list[FakeRequest]:
        """Check and compile the grammar first, as the engine does."""
        if params.structured is not None:
            self._compiled(params.structured)
        return await super().submit(prompts, params, **more)

    async def script(
        self, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[OutputDelta, None]:
        speaker = copy(self)
        scripts = SCRIPT.findall(self.tokenizer.decode(prompt, False))
        if params.structured is not None:
            speaker.reply = self._guided(params.structured, scripts[-1] if scripts else None)
        elif scripts:
            speaker.reply = scripts[-1]
        async for delta in FakeEngine.script(speaker, prompt, params):
            yield delta

    def _compiled(self, wanted: StructuredOutput) -> str:
        grammar, error = compile_grammar(list(to_grammar_source(wanted)), self.vocabulary)
        if error:
            raise FieldError(wanted.param, f"{wanted.param} cannot be used: {error}")
        return grammar

    def _guided(self, wanted: StructuredOutput, script: str | None) -> str:
        """Return a text of the grammar."""
        matcher = LLMatcher(self.vocabulary, self._compiled(wanted), log_level=0)
        if script is not None:
            ids = self.tokenizer.encode(script, False)
            if matcher.try_consume_tokens(ids) < len(ids) or not matcher.is_accepting():
                raise RuntimeError(f"the grammar does not take {script!r}")
            return script
        chance, ids = random.Random(0), list[int]()
        while not (ids and matcher.is_accepting()) and len(ids) < MAX_TOKENS:
            allowed = [t for t in _set_bits(matcher.compute_bitmask()) if t != 2]
            if not allowed:
                break
            ends = [t for t in allowed if set(self.tokenizer.decode([t], False)) <= CLOSING]
            token = chance.choice(ends if ends and chance.random() < 0.7 else allowed)
            matcher.consume_token(token)
            ids.append(token)
        return self.tokenizer.decode(ids, False)


def scripted_engine() -> ScriptedEngine:
    """Return an engine with the demo model's tokenizer and template."""
    return ScriptedEngine(Tokenizer.load(DEMO))


@asynccontextmanager
async def scripted_server(reasoning: str = "auto") -> AsyncIterator[Server]:
    """Serve a scripted engine in this process; `reasoning` is the reasoning parser."""
    engine = scripted_engine()
    config = ServerConfig(reasoning_parser=reasoning)
    async with TestClient(RealServer(engine, config)) as client:
        yield Server(engine, client)


async def _serve(port: int) -> None:
    for at, reasoning in ((port, "auto"), (port + 1, "think")):
        config = ServerConfig(reasoning_parser=reasoning)
        runner = ConnectionRunner(make_app(scripted_engine(), config), config)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", at).start()
        print(f"scripted server at http://127.0.0.1:{at}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8471)
    asyncio.run(_serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
