"""Compile grammars before their requests are accepted.

Compilation runs in a separate process (compiler_process.py); results are cached. The
last stage compiles an accepted grammar again.
"""

import asyncio
import json
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gllm.config.sampling import StructuredOutput
from gllm.observability.child_process import (
    describe_exit,
    has_import_failure,
    module_command,
    read_process_usage,
)
from gllm.options.field_types import FieldError
from gllm.text.grammar.compiler_process import CPU_SECONDS, MEMORY_BYTES, STACK_BYTES
from gllm.text.grammar.sources.structured_output import GrammarSource, to_grammar_source

log = logging.getLogger(__name__)

PROCESS_MODULE = "gllm.text.grammar.compiler_process"
"""Module that the process runs."""
MAX_CACHED_GRAMMARS = 1024
"""Largest number of cached results."""
MAX_CACHED_CHARACTERS = 2**24
"""Largest total length of cached grammars and their sources."""
STALL_SECONDS = 5.0
"""Time without an answer and without CPU time after which the process is replaced."""
ANSWER_SECONDS = 60.0
"""Time without an answer after which the process is replaced. Its own limit is CPU time, of which
it may get little on a busy machine."""
START_SECONDS = 60.0
"""Limit for the start of the process."""
MAX_ANSWER_BYTES = 2**23
"""Size limit of an answer."""
LIMIT_SIGNALS = {
    signal.SIGPROF: f"{CPU_SECONDS:g} s",
    signal.SIGSEGV: f"a stack of {STACK_BYTES >> 20} MiB",
    signal.SIGABRT: f"{MEMORY_BYTES >> 20} MiB",
}
"""Signals that end the process if a grammar exceeds a limit, and these limits."""
MAX_ATTEMPTS = 2
"""Number of processes that compile one grammar, if they end for another reason."""


@dataclass(frozen=True)
class CompilerLimits:
    """Limits of `GrammarCompiler`: cache size, compile time and size of a result."""

    max_cached_grammars: int = MAX_CACHED_GRAMMARS
    max_cached_characters: int = MAX_CACHED_CHARACTERS
    stall_seconds: float = STALL_SECONDS
    answer_seconds: float = ANSWER_SECONDS
    max_answer_bytes: int = MAX_ANSWER_BYTES


class GrammarError(ValueError):
    """A grammar of a request is invalid or too complex; the message tells the client why."""


class CompilerBusyError(Exception):
    """No grammar can be compiled now: the compiler process has failed."""


class _StartError(Exception):
    """The process has ended before it was ready; the message says how."""


class _StalledError(Exception):
    """The process neither answers nor computes."""


class GrammarCompiler:
    """Compiles grammars of structured outputs for one model, in a child process with a cache.

    Concurrent requests with the same grammar share one compilation. Any number of grammars may
    wait: the limit on queued requests bounds them. A grammar whose requests have all left is not
    compiled.

    Args:
        folder: The model folder.
        vocab_size: Vocabulary size of the model.
        eos_ids: Tokens that end a sequence.
        limits: Limits of cache, queue and results; None for the defaults.
        process_module: Module that the child process runs.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_ids: Sequence[int],
        limits: CompilerLimits | None = None,
        process_module: str = PROCESS_MODULE,
    ) -> None:
        self._limits, self._process_module = limits or CompilerLimits(), process_module
        self._arguments = [str(folder), str(vocab_size), *map(str, eos_ids)]
        self._cache: OrderedDict[GrammarSource, tuple[str, str]] = OrderedDict()
        """Grammar and error by source, least recently used first."""
        self._num_cached_characters = 0
        self._num_compiled = 0
        self._tasks: dict[GrammarSource, asyncio.Task[tuple[str, str]]] = {}
        self._num_waiting: Counter[GrammarSource] = Counter()
        """Number of callers that wait for each compilation."""
        self._running: GrammarSource | None = None
        """Grammar that the process compiles."""
        self._lock = asyncio.Lock()
        self._process: Process | None = None
        self._has_started = False
        """True once a process was ready."""
        self._import_failure = ""
        """Exit of the first process, if its modules cannot be imported: no other one is started."""
        self._is_fresh = False
        """True if the process has not compiled a grammar yet."""

    def describe(self) -> dict[str, int | None]:
        """Return counters of the compiler, its cache and its process."""
        return {
            "process_id": None if self._process is None else self._process.pid,
            "num_compiled": self._num_compiled,
            "num_cached_grammars": len(self._cache),
            "num_cached_characters": self._num_cached_characters,
        }

    async def compile_structured_output(self, structured: StructuredOutput) -> str:
        """Compile the grammar of a structured output.

        Raises:
            FieldError: The grammar is invalid or too complex; the error names the request's field.
            CompilerBusyError: Grammars cannot be compiled at the moment.
        """
        source = await asyncio.to_thread(to_grammar_source, structured)
        try:
            return await self.compile(source)
        except GrammarError as error:
            param = structured.param
            raise FieldError(param, f"{param} cannot be used: {error}") from error

    async def compile(self, source: GrammarSource) -> str:
        """Compile a grammar to llguidance's form, which the last stage loads.

        Raises:
            GrammarError: The grammar is invalid or too complex.
            CompilerBusyError: Grammars cannot be compiled at the moment.
        """
        if source in self._cache:
            self._cache.move_to_end(source)
            grammar, error = self._cache[source]
        else:
            grammar, error = await self._wait(source)
        if error:
            raise GrammarError(error)
        return grammar

    async def close(self) -> None:
        """Stop the process; requests that wait for it get CompilerBusyError."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        await self._end()

    async def _wait(self, source: GrammarSource) -> tuple[str, str]:
        """Return the result of compiling a grammar.

        A cancelled caller does not cancel a compilation that the process has begun: its answer
        would be read as the next one's.
        """
        task = self._find_or_create_task(source)
        self._num_waiting[source] += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise CompilerBusyError("the engine was stopped") from None
        finally:
            self._num_waiting[source] -= 1
            if not self._num_waiting[source]:
                del self._num_waiting[source]
                if source != self._running and self._tasks.get(source) is task:
                    del self._tasks[source]
                    task.cancel()

    def _find_or_create_task(self, source: GrammarSource) -> "asyncio.Task[tuple[str, str]]":
        """Return the running compilation of a grammar, or start one."""
        if source not in self._tasks:
            self._tasks[source] = asyncio.create_task(self._compile(source))
        return self._tasks[source]

    async def _compile(self, source: GrammarSource) -> tuple[str, str]:
        async with self._lock:
            self._num_compiled += 1
            self._running = source
            try:
                answer = await self._request(source)
            except GrammarError as error:
                answer = "", str(error)
            finally:
                self._running = None
                self._tasks.pop(source, None)
        self._remember(source, answer)
        return answer

    def _remember(self, source: GrammarSource, answer: tuple[str, str]) -> None:
        self._cache[source] = answer
        self._num_cached_characters += _size(source, answer)
        while (
            len(self._cache) > self._limits.max_cached_grammars
            or self._num_cached_characters > self._limits.max_cached_characters
        ):
            self._num_cached_characters -= _size(*self._cache.popitem(last=False))

    async def _request(self, source: GrammarSource) -> tuple[str, str]:
        """Return grammar and error from the process.

        A process that ends for a reason other than a limit, or that is stopped, is replaced, and
        the new one compiles the grammar.

        Raises:
            GrammarError: The grammar exceeds a limit.
            CompilerBusyError: The new process ended as well.
        """
        ending = ""
        for _ in range(MAX_ATTEMPTS):
            if self._import_failure:
                raise CompilerBusyError(f"grammars cannot be compiled ({self._import_failure})")
            process = self._process
            if process is None or process.returncode is not None:
                try:
                    process = await self._start()
                except _StartError as failure:
                    ending = f"it does not start: {failure}"
                    continue
            was_fresh, self._is_fresh = self._is_fresh, False
            try:
                line = await self._exchange(process, source)
            except _StalledError:
                await self._end()
                ending = f"no answer and no progress in {self._limits.stall_seconds:g} s"
                log.warning("the process that compiles grammars is replaced: %s", ending)
                continue
            if line:
                grammar, error = json.loads(line)
                return grammar, error
            code = await process.wait()
            await self._end()
            # Memory and stack of a process that compiled before may be used up by other grammars.
            if -code in LIMIT_SIGNALS and (was_fresh or -code == signal.SIGPROF):
                limit = LIMIT_SIGNALS[signal.Signals(-code)]
                raise GrammarError(f"it is too complex: compiling takes more than {limit}")
            ending = describe_exit(code)
            log.warning("the process that compiles grammars ended: %s", ending)
        raise CompilerBusyError(f"grammars cannot be compiled now ({ending}): try again later")

    async def _exchange(self, process: Process, source: GrammarSource) -> bytes:
        """Send a grammar to the process and return its answer, empty if the process has ended.

        Raises:
            _StalledError: The process neither answers nor computes.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(source).encode() + b"\n")
            async with asyncio.timeout(self._limits.stall_seconds):
                await process.stdin.drain()
        except TimeoutError:
            raise _StalledError from None
        except (ConnectionError, RuntimeError):
            # uvloop raises RuntimeError once it has closed the pipe of a process that has ended.
            return b""
        try:
            seconds = self._limits.answer_seconds
            async with asyncio.timeout(seconds):
                line = await self._read_line(process.pid, process.stdout)
        except TimeoutError:
            await self._end()
            # The process did not get its CPU time: the machine is too busy.
            raise CompilerBusyError(
                f"grammars cannot be compiled now (no answer in {seconds:g} s): try again later"
            ) from None
        except ValueError:
            # The rest of the line would be read as the next answer.
            await self._end()
            raise GrammarError(
                "it is too complex: compiled it has over "
                f"{self._limits.max_answer_bytes / 2**20:g} MiB"
            ) from None
        return _complete_line(line)

    async def _read_line(self, process_id: int, output: asyncio.StreamReader) -> bytes:
        """Return the next line of a process. Raises _StalledError if it does not compute."""
        cpu_seconds = _read_cpu_seconds(process_id)
        while True:
            try:
                async with asyncio.timeout(self._limits.stall_seconds):
                    return await output.readline()
            except TimeoutError:
                before, cpu_seconds = cpu_seconds, _read_cpu_seconds(process_id)
                if before == cpu_seconds:
                    raise _StalledError from None

    async def _start(self) -> Process:
        """Start a process and wait until it is ready.

        Raises:
            _StartError: It ends before it is ready.
            GrammarError: The model's tokenizer does not support grammars.
        """
        # The limits apply to one thread, which is all that the process uses.
        environment = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = module_command(self._process_module, *self._arguments)
        limit = self._limits.max_answer_bytes
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, limit=limit, env=environment
        )
        self._process = process
        assert process.stdout is not None
        line = b""
        with suppress(TimeoutError):
            line = _complete_line(await asyncio.wait_for(process.stdout.readline(), START_SECONDS))
        error = json.loads(line)[1] if line else ""
        if error or not line:
            await self._end()
        if error:
            raise GrammarError(error)
        if not line:
            ending = describe_exit(await process.wait())
            log.warning("the process that compiles grammars does not start: %s", ending)
            if not self._has_started and has_import_failure(ending):
                self._import_failure = ending
            raise _StartError(ending)
        self._is_fresh = self._has_started = True
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _read_cpu_seconds(process_id: int) -> float:
    """Return the CPU time of a process; 0 if there is none."""
    usage = read_process_usage(process_id)
    return 0.0 if usage is None else usage[1]


def _complete_line(line: bytes) -> bytes:
    """Return a line, or nothing if a process wrote only a part of it before it ended."""
    return line if line.endswith(b"\n") else b""


def _size(source: GrammarSource, answer: tuple[str, str]) -> int:
    return len(source.text) + sum(map(len, answer))
