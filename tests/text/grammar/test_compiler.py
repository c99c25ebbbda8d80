"""The process that compiles: what it refuses, what it survives, what is remembered."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager, suppress

import pytest

from gllm.config.sampling import StructuredOutput
from gllm.observability.child_process import IMPORT_FAILURE
from gllm.options.field_types import FieldError
from gllm.text.grammar import compiler_process
from gllm.text.grammar.compiler import (
    PROCESS_MODULE,
    CompilerBusyError,
    CompilerLimits,
    GrammarCompiler,
    GrammarError,
)
from gllm.text.grammar.sources.structured_output import GrammarSource
from tests.support.stopped_process import stop_process
from tests.support.text import dying_compiler
from tests.support.text.grammar_writing import EOS, FOLDER, VOCABULARY

GOOD = GrammarSource("regex", "[a-z]+")
FATAL = GrammarSource("regex", dying_compiler.FATAL)
HANGS = "start: T\nT: /(.*a.{15}.*)/ & /(.*b.{15}.*)/ & ~/.*c.{13}.*/ & /(.*d.{17}.*)/"
RULES = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000))
WIDE = {f"p{i}": {"type": "string"} for i in range(3000)}

HOSTILE = {
    "takes for ever": StructuredOutput(grammar=HANGS),
    "overflows the stack": StructuredOutput(grammar=f'start: r0\n{RULES}\nr3000: "a"'),
    "many repetitions": StructuredOutput(regex="(((a{100}){100}){100}){100}"),
    "many repetitions behind a token": StructuredOutput(regex="x(a{1000}){1000}"),
    "nested groups": StructuredOutput(regex="(" * 4000 + "a" + ")" * 4000),
    "brackets in Lark": StructuredOutput(grammar="start: " + "(" * 30000),
    "brackets in GBNF": StructuredOutput(grammar="root ::= " + "(" * 30000),
    "many optional properties": StructuredOutput(json={"type": "object", "properties": WIDE}),
    "ambiguous": StructuredOutput(grammar="start: (r{1000}){1000}\nr: /a/"),
}
REFUSED = {
    "look-around": StructuredOutput(regex="(?=a)b"),
    "not a regex": StructuredOutput(regex="(a"),
    "no start": StructuredOutput(grammar='root: "a"'),
    "unknown rule": StructuredOutput(grammar="start: other"),
    "nothing fits": StructuredOutput(json={"type": "integer", "minimum": 3, "maximum": 2}),
    "never ends": StructuredOutput(json={"$ref": "#"}),
    "a format that is no name": StructuredOutput(json={"type": "string", "format": 7}),
    "unknown type": StructuredOutput(json={"type": "text"}),
    "odd bound": StructuredOutput(json={"type": "string", "minLength": "x"}),
    "the library's own format": StructuredOutput(grammar='{"grammars": [{"json_schema": {}}]}'),
}


@asynccontextmanager
async def opened(process_module=PROCESS_MODULE, **limits):
    """A compiler, which is closed in the end."""
    made = GrammarCompiler(FOLDER, VOCABULARY, (EOS,), CompilerLimits(**limits), process_module)
    yield made
    await made.close()
    assert made.describe()["process_id"] is None


@pytest.fixture
async def compiler():
    async with opened() as made:
        yield made


def kill(compiler):
    """Kill the process; return its id."""
    process_id = compiler.describe()["process_id"]
    os.kill(process_id, signal.SIGKILL)
    return process_id


@pytest.mark.parametrize(
    "names",
    [
        ["overflows the stack", "nested groups"],
        pytest.param([*HOSTILE], marks=pytest.mark.full, id="all"),
    ],
)
async def test_hostile_grammars_are_refused_and_the_next_one_is_served(compiler, names):
    for number, name in enumerate(names):
        wanted = HOSTILE[name]
        with pytest.raises(FieldError) as refused:
            await compiler.compile_structured_output(wanted)
        assert refused.value.param == "structured", name
        assert name != "takes for ever" or "more than 2 s" in str(refused.value)
        assert await compiler.compile(GrammarSource("regex", f"good{number}"))


async def test_what_does_not_compile_is_told(compiler):
    for name, wanted in REFUSED.items():
        with pytest.raises(FieldError, match="structured cannot be used") as refused:
            await compiler.compile_structured_output(wanted)
        assert len(str(refused.value)) < 1000, name


async def test_an_answer_is_remembered_good_or_bad(compiler):
    good = await compiler.compile(GOOD)
    bad = GrammarSource("regex", "(a")
    with pytest.raises(GrammarError) as first:
        await compiler.compile(bad)
    kill(compiler)
    assert await compiler.compile(GOOD) == good
    with pytest.raises(GrammarError, match="invalid") as second:
        await compiler.compile(bad)
    assert str(first.value) == str(second.value)
    assert compiler.describe()["num_compiled"] == 2


async def test_signals_that_all_processes_get_are_for_the_parent(compiler):
    await compiler.compile(GrammarSource("regex", "a"))
    before = compiler.describe()["process_id"]
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(before, number)
    await compiler.compile(GrammarSource("regex", "b"))
    assert compiler.describe()["process_id"] == before


async def test_a_process_that_is_gone_is_replaced(compiler):
    await compiler.compile(GOOD)
    process_id = kill(compiler)
    with suppress(ProcessLookupError):
        while True:
            os.kill(process_id, 0)
            await asyncio.sleep(0.01)
    assert await compiler.compile(GrammarSource("regex", "one"))


@pytest.mark.parametrize(
    ("number", "output"),
    [
        (signal.SIGKILL, ""),
        (signal.SIGSEGV, '["half an ans'),
        pytest.param(signal.SIGBUS, "", marks=pytest.mark.full),
        pytest.param(signal.SIGABRT, '["half an ans', marks=pytest.mark.full),
    ],
)
async def test_a_process_that_dies_over_a_good_grammar_is_replaced(
    monkeypatch, tmp_path, caplog, number, output
):
    """The grammar is not at fault, and is compiled by the next process.

    The process ends itself while it compiles: a signal from here would race with its answer, for
    the kernel stops or ends another process only when that process gets a processor.
    """
    death = tmp_path / "death"
    monkeypatch.setenv("DEATH", str(death))
    async with opened(dying_compiler.__name__) as compiler:
        await compiler.compile(GOOD)
        first = compiler.describe()["process_id"]
        death.write_text(f"{int(number)} once {output}")
        assert dying_compiler.FATAL in await compiler.compile(FATAL)
        assert f"killed by {number.name}" in caplog.text
        assert compiler.describe()["process_id"] != first
        assert not death.exists()


async def test_who_comes_behind_a_death_is_not_blamed(compiler):
    """Nobody has noticed it yet."""
    for i in range(2):
        await compiler.compile(GrammarSource("regex", f"before{i}"))
        kill(compiler)
        assert await compiler.compile(GrammarSource("regex", f"behind{i}"))


async def test_a_pipe_that_uvloop_has_closed_is_that_of_a_dead_process(monkeypatch):
    """Its transports raise RuntimeError then, for a moment before the exit is known."""
    create = asyncio.create_subprocess_exec
    pids: list[int] = []

    async def create_closed(*command, **options):
        process = await create(*command, **options)
        if not pids:

            def write(data):
                process.kill()
                raise RuntimeError("unable to perform operation; the handler is closed")

            monkeypatch.setattr(process.stdin, "write", write)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_closed)
    async with opened() as compiler:
        assert await compiler.compile(GOOD)
        assert compiler.describe()["process_id"] == pids[1]


async def test_a_process_that_keeps_dying_is_no_fault_of_the_grammar(monkeypatch, tmp_path, caplog):
    death = tmp_path / "death"
    death.write_text(f"{int(signal.SIGKILL)} always ")
    monkeypatch.setenv("DEATH", str(death))
    async with opened(dying_compiler.__name__) as compiler:
        with pytest.raises(CompilerBusyError, match="killed by SIGKILL"):
            await compiler.compile(FATAL)
        assert caplog.text.count("the process that compiles grammars ended") == 2
        assert compiler.describe()["num_cached_grammars"] == 0
        death.unlink()
        assert await compiler.compile(FATAL)


async def test_a_limit_is_named(compiler):
    for _ in range(2):
        with pytest.raises(FieldError, match="stack of 4 MiB"):
            await compiler.compile_structured_output(HOSTILE["overflows the stack"])
    assert compiler.describe()["num_compiled"] == 1


async def test_an_answer_beyond_bounds_is_not_mixed_up_with_the_next():
    async with opened(max_answer_bytes=2**12) as compiler:
        with pytest.raises(GrammarError, match="too complex"):
            await compiler.compile(GrammarSource("regex", "x" * 2**13))
        assert "next" in await compiler.compile(GrammarSource("regex", "next"))


@pytest.mark.parametrize(
    ("error", "told"),
    [(MemoryError(), "1024 MiB"), (ValueError("odd"), "odd"), (BaseException("panic"), "panic")],
)
def test_whatever_the_library_raises_is_an_answer(error, told):
    def raises(*_):
        raise error

    grammar, reason = compiler_process.compile_or_error(["regex", "a"], None, raises)
    assert grammar == ""
    assert told in reason


async def test_a_caller_that_leaves_does_not_mix_up_answers(compiler):
    sources = [GrammarSource("regex", f"a{{{i}}}") for i in range(1, 20)]
    tasks = [asyncio.create_task(compiler.compile(source)) for source in sources]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    kept = await asyncio.gather(*tasks[1::2])
    for source, grammar in zip(sources[1::2], kept, strict=True):
        assert f"/{source.text}/" in grammar
    assert all(task.cancelled() for task in tasks[::2])


async def test_who_waits_when_it_is_closed_is_told(compiler):
    await compiler.compile(GOOD)
    waiting = asyncio.create_task(compiler.compile(GrammarSource("lark", HANGS)))
    await asyncio.sleep(0.1)
    await compiler.close()
    with pytest.raises(CompilerBusyError, match="stopped"):
        await waiting


async def test_one_without_an_answer_is_given_up():
    """It computes, so it is not taken for one that is stopped."""
    async with opened(answer_seconds=0.5, stall_seconds=0.2) as compiler:
        with pytest.raises(CompilerBusyError, match=r"no answer in 0\.5 s"):
            await compiler.compile(GrammarSource("lark", HANGS))
        state = compiler.describe()
        assert (state["process_id"], state["num_cached_grammars"]) == (None, 0)
        assert await compiler.compile(GrammarSource("regex", "next"))


async def test_one_grammar_is_compiled_once_for_all_that_wait(compiler):
    answers = await asyncio.gather(*(compiler.compile(GOOD) for _ in range(10)))
    assert len(set(answers)) == 1
    assert compiler.describe()["num_compiled"] == 1


async def test_many_different_grammars_at_once_wait_for_one_another(compiler):
    sources = [GrammarSource("regex", f"b{{{i}}}") for i in range(1, 81)]
    answers = await asyncio.gather(*map(compiler.compile, sources))
    assert all(
        f"/{source.text}/" in answer for source, answer in zip(sources, answers, strict=True)
    )


async def test_a_grammar_that_nobody_waits_for_is_not_compiled(compiler):
    await compiler.compile(GOOD)
    running, *others = [GrammarSource("regex", f"e{{{i}}}") for i in range(1, 9)]
    tasks = [asyncio.create_task(compiler.compile(each)) for each in (running, *others, *others)]
    await asyncio.sleep(0)
    for task in tasks[1 : 1 + len(others)]:
        task.cancel()
    tasks[-1].cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, str) for one in answers] == [True, *[False] * 7, *[True] * 6, False]
    assert compiler.describe()["num_compiled"] == 8, "one each of those that somebody waited for"
    assert await compiler.compile(others[-1])


async def test_a_process_that_is_stopped_is_replaced(caplog):
    async with opened(stall_seconds=0.5) as compiler:
        await compiler.compile(GOOD)
        process_id = compiler.describe()["process_id"]
        await stop_process(process_id)
        sources = [GrammarSource("regex", f"f{{{i}}}") for i in range(1, 4)]
        answers = await asyncio.gather(*map(compiler.compile, sources))
        assert all(answers)
        assert compiler.describe()["process_id"] != process_id
        assert "no answer and no progress in 0.5 s" in caplog.text


async def compiled_anew(compiler, *texts):
    """Compile regular expressions; return those that were not remembered."""
    anew = []
    for text in texts:
        before = compiler.describe()["num_compiled"]
        await compiler.compile(GrammarSource("regex", text))
        if compiler.describe()["num_compiled"] > before:
            anew.append(text)
    return anew


async def test_the_grammars_used_last_are_remembered():
    texts = [f"c{i}" for i in range(6)]
    async with opened(max_cached_grammars=3) as compiler:
        assert await compiled_anew(compiler, *texts) == texts
        assert await compiled_anew(compiler, *texts[3:]) == []
        # The least recently used one makes room.
        assert await compiled_anew(compiler, "c3", "d") == ["d"]
        assert compiler.describe()["num_cached_grammars"] == 3
        assert await compiled_anew(compiler, "d", "c3", "c5") == []
        assert await compiled_anew(compiler, "c4") == ["c4"]


async def test_characters_that_are_remembered_are_bounded():
    async with opened() as compiler:
        await compiled_anew(compiler, "a{2}", "b{3}")
        both = compiler.describe()["num_cached_characters"]
    async with opened(max_cached_characters=both) as compiler:
        await compiled_anew(compiler, "a{2}", "b{3}")
        assert compiler.describe()["num_cached_grammars"] == 2
        assert await compiled_anew(compiler, "c", "b{3}", "a{2}") == ["c", "a{2}"]
        await compiled_anew(compiler, "d" * 1000)
        state = compiler.describe()
        assert (state["num_cached_grammars"], state["num_cached_characters"]) == (0, 0)


async def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(tmp_path):
    compiler = GrammarCompiler(tmp_path, VOCABULARY, (EOS,))
    with pytest.raises(CompilerBusyError, match="does not start"):
        await compiler.compile(GOOD)
    state = compiler.describe()
    assert (state["process_id"], state["num_cached_grammars"]) == (None, 0)


async def test_a_process_whose_modules_cannot_be_imported_is_started_once(
    broken_imports: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as compiler:
        for _ in range(2):
            with pytest.raises(CompilerBusyError, match=IMPORT_FAILURE):
                await compiler.compile(GOOD)
    assert caplog.text.count("the process that compiles grammars does not start") == 1


async def test_a_model_without_an_end_has_no_grammars():
    compiler = GrammarCompiler(FOLDER, VOCABULARY, (VOCABULARY,))
    with pytest.raises(GrammarError, match="no token that ends"):
        await compiler.compile(GOOD)
    await compiler.close()
