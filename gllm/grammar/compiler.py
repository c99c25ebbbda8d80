"""Compiles grammars before their requests are taken, in a process of its own (compiler_process.py).

Owns that process and a bounded memory of what it said. Knows nothing of what a grammar does later:
the last stage compiles it again.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gllm.config.field_types import FieldError
from gllm.config.sampling import StructuredOutput
from gllm.grammar.compiler_process import CPU_SECONDS, MEMORY, STACK
from gllm.grammar.sources.structured_output import GrammarSource, to_grammar_source

log = logging.getLogger(__name__)

CHILD = "gllm.grammar.compiler_process"
"""Module that the process runs."""
MAX_ENTRIES = 1024
MAX_CHARACTERS = 2**24
"""Of all grammars that are remembered."""
MAX_WAITING = 64
"""Grammars that wait for their turn."""
PATIENCE = 60.0
"""Seconds without an answer after which the process is taken for stuck: its own bound is CPU time,
of which a busy machine may give it little."""
LINE = 2**23
"""Bytes of an answer at most."""
LIMITS = {
    signal.SIGPROF: f"{CPU_SECONDS:g} s",
    signal.SIGSEGV: f"a stack of {STACK >> 20} MiB",
    signal.SIGABRT: f"{MEMORY >> 20} MiB",
}
"""Signals that end the process over a grammar's own limits, and those."""
ATTEMPTS = 2
"""Processes that one grammar is given to, where they end for another reason."""


class GrammarError(ValueError):
    """A grammar that cannot be used; the message is for whoever wrote it."""


class CompilerBusyError(Exception):
    """Nothing can be compiled now, which is no fault of the grammar."""


class GrammarCompiler:
    """What has been compiled for one model, and the process that does it, made when first needed.

    Each grammar is compiled once, however many requests wait for it.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._arguments = [str(folder), str(vocab_size), *map(str, eos_ids)]
        self._known: OrderedDict[GrammarSource, tuple[str, str]] = OrderedDict()
        """Grammar and error by what was compiled, the one used longest ago first."""
        self._characters = 0
        self._under_way: dict[GrammarSource, asyncio.Task[tuple[str, str]]] = {}
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._is_fresh = False
        """Whether the process has been given no grammar yet."""

    async def compile_structured_output(self, wanted: StructuredOutput) -> str:
        """What a structured output asks for, compiled. Raises FieldError and CompilerBusy."""
        source = await asyncio.to_thread(to_grammar_source, wanted)
        try:
            return await self.compile(source)
        except GrammarError as error:
            raise FieldError(wanted.param, f"{wanted.param} cannot be used: {error}") from error

    async def compile(self, source: GrammarSource) -> str:
        """The grammar as the last stage wants it. Raises BadGrammar and CompilerBusy."""
        if source in self._known:
            self._known.move_to_end(source)
            grammar, error = self._known[source]
        else:
            grammar, error = await self._wait(self._task(source))
        if error:
            raise GrammarError(error)
        return grammar

    async def close(self) -> None:
        """End the process; who still waits for it gets CompilerBusy."""
        for task in self._under_way.values():
            task.cancel()
        await self._end()

    async def _wait(self, task: "asyncio.Task[tuple[str, str]]") -> tuple[str, str]:
        """What a task brings. A caller that leaves does not end it: its answer is on the way, and
        would be taken for the next one's."""
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise CompilerBusyError("the engine was stopped") from None

    def _task(self, source: GrammarSource) -> "asyncio.Task[tuple[str, str]]":
        if source in self._under_way:
            return self._under_way[source]
        if len(self._under_way) >= MAX_WAITING:
            raise CompilerBusyError(f"{MAX_WAITING} grammars wait to be compiled: try again later")
        task = asyncio.create_task(self._compile(source))
        self._under_way[source] = task
        task.add_done_callback(lambda _: self._under_way.pop(source, None))
        return task

    async def _compile(self, source: GrammarSource) -> tuple[str, str]:
        async with self._turn:
            try:
                answer = await self._ask(source)
            except GrammarError as error:
                answer = "", str(error)
        self._remember(source, answer)
        return answer

    def _remember(self, source: GrammarSource, answer: tuple[str, str]) -> None:
        self._known[source] = answer
        self._characters += _size(source, answer)
        while len(self._known) > MAX_ENTRIES or self._characters > MAX_CHARACTERS:
            self._characters -= _size(*self._known.popitem(last=False))

    async def _ask(self, source: GrammarSource) -> tuple[str, str]:
        """Return the process's answer: grammar and error.

        Raises BadGrammar where compiling exceeds a limit of its own. A process that ends for
        another reason is replaced, and the grammar is given to the next one; CompilerBusy where
        that ends too.
        """
        ending = ""
        for _ in range(ATTEMPTS):
            process = self._process
            if process is None or process.returncode is not None:
                process = await self._start()
            if process is None:
                ending = "it does not start"
                continue
            was_fresh, self._is_fresh = self._is_fresh, False
            line = await self._exchange(process, source)
            if line:
                grammar, error = json.loads(line)
                return grammar, error
            code = await process.wait()
            await self._end()
            # What others left behind may be what a process that compiled before dies of.
            if -code in LIMITS and (was_fresh or -code == signal.SIGPROF):
                limit = LIMITS[signal.Signals(-code)]
                raise GrammarError(f"it is too complex: compiling takes more than {limit}")
            ending = _ending(code)
            log.warning("the process that compiles grammars ended: %s", ending)
        raise CompilerBusyError(f"grammars cannot be compiled now ({ending}): try again later")

    async def _exchange(self, process: Process, source: GrammarSource) -> bytes:
        """Give the process a grammar; return its answer, empty where it has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(source).encode() + b"\n")
            await process.stdin.drain()
        except ConnectionError:
            return b""
        try:
            line = await asyncio.wait_for(process.stdout.readline(), PATIENCE)
        except TimeoutError:
            await self._end()
            # Its own bound is CPU time, which it did not get: that is the machine's fault.
            raise CompilerBusyError(
                f"grammars cannot be compiled now (no answer in {PATIENCE:g} s): try again later"
            ) from None
        except ValueError:
            # The rest of the line would be taken for the next answer.
            await self._end()
            raise GrammarError(
                f"it is too complex: it becomes more than {LINE >> 20} MiB"
            ) from None
        return _whole(line)

    async def _start(self) -> Process | None:
        """Start a process; None where it ends before it is ready.

        Raises BadGrammar where this model has no grammars at all.
        """
        # One thread is all that is bounded and all that is used.
        environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = (sys.executable, "-m", CHILD, *self._arguments)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=LINE, env=environment
        )
        self._process = process
        assert process.stdout is not None
        line = b""
        with suppress(TimeoutError):
            line = _whole(await asyncio.wait_for(process.stdout.readline(), PATIENCE))
        error = json.loads(line)[1] if line else ""
        if error or not line:
            await self._end()
        if error:
            raise GrammarError(error)
        self._is_fresh = True
        return process if line else None

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _whole(line: bytes) -> bytes:
    """Return a line, or nothing in place of the part that a process wrote before it ended."""
    return line if line.endswith(b"\n") else b""


def _ending(code: int) -> str:
    """Return how a process ended, in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _size(source: GrammarSource, answer: tuple[str, str]) -> int:
    return len(source.text) + sum(map(len, answer))
