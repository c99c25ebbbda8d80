"""The process that compiles: what it refuses, what it survives, what is remembered."""

import asyncio
import os
import signal

import pytest

from gllm.config.field_types import FieldError
from gllm.config.sampling import StructuredOutput
from gllm.grammar import compiler as module
from gllm.grammar import compiler_process
from gllm.grammar.compiler import CompilerBusyError, GrammarCompiler, GrammarError
from gllm.grammar.sources.structured_output import GrammarSource
from tests.support.text import dying_compiler
from tests.support.text.grammar_writing import EOS, FOLDER, VOCABULARY

GOOD = GrammarSource("regex", "[a-z]+")
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
    "unknown format": StructuredOutput(json={"type": "string", "format": "sonnet"}),
    "unknown type": StructuredOutput(json={"type": "text"}),
    "odd bound": StructuredOutput(json={"type": "string", "minLength": "x"}),
    "the library's own format": StructuredOutput(grammar='{"grammars": [{"json_schema": {}}]}'),
}


@pytest.fixture
async def compiler():
    made = GrammarCompiler(FOLDER, VOCABULARY, (EOS,))
    yield made
    await made.close()
    assert made._process is None


async def test_hostile_grammars_are_refused_and_the_next_one_is_served(compiler):
    for number, (name, wanted) in enumerate(HOSTILE.items()):
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
    compiler._process.kill()
    assert await compiler.compile(GOOD) == good
    with pytest.raises(GrammarError, match="invalid") as second:
        await compiler.compile(bad)
    assert str(first.value) == str(second.value)


async def test_a_process_that_is_gone_is_replaced(compiler):
    await compiler.compile(GOOD)
    compiler._process.kill()
    await compiler._process.wait()
    assert await compiler.compile(GrammarSource("regex", "one"))


@pytest.mark.parametrize("output", ["", '["half an ans'])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
async def test_a_process_that_dies_over_a_good_grammar_is_replaced(
    compiler, monkeypatch, tmp_path, number, output
):
    """The grammar is not at fault, and is compiled by the next process.

    The process ends itself while it compiles: a signal from here would race with its answer, for
    the kernel stops or ends another process only when that process gets a processor.
    """
    death = tmp_path / "death"
    monkeypatch.setattr(module, "PROCESS_MODULE", dying_compiler.__name__)
    monkeypatch.setenv("DEATH", str(death))
    await compiler.compile(GOOD)
    first = compiler._process
    death.write_text(f"{int(number)} {output}")
    assert dying_compiler.FATAL in await compiler.compile(
        GrammarSource("regex", dying_compiler.FATAL)
    )
    assert first.returncode == -number
    assert compiler._process.pid != first.pid
    assert not death.exists()


async def test_who_comes_behind_a_death_is_not_blamed(compiler):
    """Nobody has noticed it yet."""
    for i in range(2):
        await compiler.compile(GrammarSource("regex", f"before{i}"))
        os.kill(compiler._process.pid, signal.SIGKILL)
        assert await compiler.compile(GrammarSource("regex", f"behind{i}"))


async def test_a_process_that_keeps_dying_is_no_fault_of_the_grammar(compiler, monkeypatch):
    started = []
    start = GrammarCompiler._start

    async def start_and_kill(self):
        process = await start(self)
        assert process is not None
        started.append(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(GrammarCompiler, "_start", start_and_kill)
    with pytest.raises(CompilerBusyError, match="killed by SIGKILL"):
        await compiler.compile(GOOD)
    assert len(started) == 2
    assert not compiler._cache
    monkeypatch.undo()
    assert await compiler.compile(GOOD)


async def test_a_limit_is_named(compiler):
    with pytest.raises(FieldError, match="stack of 4 MiB"):
        await compiler.compile_structured_output(HOSTILE["overflows the stack"])
    assert [bool(error) for _, error in compiler._cache.values()] == [True]


async def test_an_answer_beyond_bounds_is_not_mixed_up_with_the_next(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 2**12)
    with pytest.raises(GrammarError, match="too complex"):
        await compiler.compile(GrammarSource("regex", "x" * 2**13))
    assert "next" in await compiler.compile(GrammarSource("regex", "next"))


@pytest.mark.parametrize(
    ("error", "told"),
    [(MemoryError(), "1024 MiB"), (ValueError("odd"), "odd"), (BaseException("panic"), "panic")],
)
def test_whatever_the_library_raises_is_an_answer(monkeypatch, error, told):
    def raises(*_):
        raise error

    monkeypatch.setattr(compiler_process, "compile_grammar", raises)
    grammar, reason = compiler_process.compile_or_error(["regex", "a"], None)
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


async def test_one_without_an_answer_is_given_up(compiler, monkeypatch):
    await compiler.compile(GOOD)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    with pytest.raises(CompilerBusyError, match="no answer in"):
        await compiler.compile(GrammarSource("lark", HANGS))
    assert compiler._process is None
    monkeypatch.undo()
    assert GrammarSource("lark", HANGS) not in compiler._cache
    assert await compiler.compile(GrammarSource("regex", "next"))


async def test_one_grammar_is_compiled_once_for_all_that_wait(compiler, monkeypatch):
    asked = []
    ask = GrammarCompiler._request

    async def counted(self, source):
        asked.append(source)
        return await ask(self, source)

    monkeypatch.setattr(GrammarCompiler, "_request", counted)
    answers = await asyncio.gather(*(compiler.compile(GOOD) for _ in range(10)))
    assert len(set(answers)) == 1
    assert asked == [GOOD]


async def test_those_that_wait_are_bounded(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    sources = [GrammarSource("regex", f"b{{{i}}}") for i in range(1, 9)]
    tasks = [asyncio.create_task(compiler.compile(source)) for source in sources]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(one, CompilerBusyError) for one in answers] == [False] * 3 + [True] * 5
    assert await compiler.compile(sources[-1])


async def test_what_is_remembered_is_bounded(compiler, monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED_GRAMMARS", 3)
    for i in range(1, 6):
        await compiler.compile(GrammarSource("regex", f"c{{{i}}}"))
    assert [source.text for source in compiler._cache] == ["c{3}", "c{4}", "c{5}"]
    await compiler.compile(GrammarSource("regex", "c{3}"))
    await compiler.compile(GOOD)
    assert [source.text for source in compiler._cache] == ["c{5}", "c{3}", "[a-z]+"]
    monkeypatch.setattr(module, "MAX_CACHED_CHARACTERS", compiler._num_cached_characters)
    await compiler.compile(GrammarSource("regex", "d" * 1000))
    assert (
        compiler._num_cached_characters <= module.MAX_CACHED_CHARACTERS or len(compiler._cache) == 0
    )


async def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(tmp_path):
    compiler = GrammarCompiler(tmp_path, VOCABULARY, (EOS,))
    with pytest.raises(CompilerBusyError, match="does not start"):
        await compiler.compile(GOOD)
    assert not compiler._cache
    assert compiler._process is None


async def test_a_model_without_an_end_has_no_grammars():
    compiler = GrammarCompiler(FOLDER, VOCABULARY, (VOCABULARY,))
    with pytest.raises(GrammarError, match="no token that ends"):
        await compiler.compile(GOOD)
    await compiler.close()
