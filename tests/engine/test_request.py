"""Requests of an engine without workers: tokens come by hand."""

import asyncio
from typing import NamedTuple

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.engine.engine import Engine
from gllm.engine.interface import EngineUnavailableError, PoisonRequestError
from gllm.engine.text_engine import TextEngine
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.models.hub import DEMO
from gllm.options.field_types import FieldError
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats, StepOutput
from gllm.text.tokenizer import Tokenizer
from tests.support.engines.ready import (
    ReadyBackend,
    ScriptedCompiler,
    create_engine,
    create_text_engine,
)
from tests.support.text.tokenizers import sentencepiece

PARAMS = SamplingParams(temperature=0)
CHOICE = SamplingParams(structured=StructuredOutput(choice=("yes", "no")))


@pytest.fixture
async def rig():
    rig = Rig(*create_engine(EngineConfig("demo")))
    yield rig
    await rig.engine.stop()


class Rig(NamedTuple):
    """An engine and the pipeline that the test plays."""

    engine: TextEngine
    backend: ReadyBackend

    @property
    def client(self):
        return self.backend.client

    @property
    def sent(self):
        """Messages to the present driver."""
        return self.backend.sent


def bring(rig, *tokens, ends=()):
    """A step with (sequence, token) pairs."""
    seqs = [seq for seq, _ in tokens]
    firsts = [FirstToken(seq, 2, 0.5) for seq in seqs]
    step = StepOutput(seqs, [token for _, token in tokens], firsts, list(ends))
    rig.client.on_report(EngineOutputs(step, SchedulerStats()))


def ids(rig, text):
    return rig.engine.tokenizer.encode(text, add_special_tokens=False)


async def test_each_prompt_is_a_request(rig):
    one, two = await rig.engine.submit([[5], [6, 7]], PARAMS)
    assert [message.prompt for message in rig.sent] == [[5], [6, 7]]
    word, other = ids(rig, "cat")[0], ids(rig, "dog")[0]
    bring(rig, (0, word), (1, other), ends=[FinishedSequence(1, "length")])
    (delta,) = one.pop_deltas()
    assert (delta.token_ids, delta.cached_tokens, delta.finish_reason) == ([word], 2, None)
    (delta,) = two.pop_deltas()
    assert (delta.token_ids, delta.finish_reason) == ([other], "length")
    assert (one.is_finished, two.is_finished, rig.engine.status().num_requests) == (False, True, 2)
    one.close()
    two.close()
    assert rig.sent[-1] == AbortSequences([0])
    assert rig.engine.status().num_requests == 0


async def test_eos_ends_an_output_unless_it_is_ignored():
    compilation = Compilation()
    compilation.may_end.set()
    engine = compilation.rig.engine
    ignored = SamplingParams(ignore_eos=True, stop_token_ids=(7,))
    # At the end of a grammar nothing but EOS is allowed.
    grammar = SamplingParams(ignore_eos=True, structured=CHOICE.structured)
    for params in (PARAMS, ignored, grammar):
        for request in await engine.submit([[5]], params):
            request.close()
    sent = [each.stop_ids for each in compilation.rig.sent if isinstance(each, SubmitRequest)]
    eos_ids = sorted(engine.model.eos_ids)
    assert eos_ids
    assert sent == [eos_ids, [7], eos_ids]


async def test_one_prompt_that_cannot_be_refuses_all(rig):
    with pytest.raises(FieldError):
        await rig.engine.submit([[5], []], PARAMS)
    assert rig.sent == []
    assert rig.engine.status().num_requests == 0


async def test_a_stop_string_ends_its_choice_where_it_is_heard(rig):
    params = SamplingParams(stop=("dog",), n=2)
    (request,) = await rig.engine.submit([[5]], params)
    seen = []
    request.set_listener(lambda: seen.extend(request.pop_deltas()))
    for token in ids(rig, "a dog"):
        bring(rig, (0, token))
    assert "".join(delta.text for delta in seen) == "a "
    assert (seen[-1].finish_reason, seen[-1].stop_reason) == ("stop", "dog")
    assert rig.sent[-1] == AbortSequences([0])
    bring(rig, (0, 7), (1, 8))
    assert seen[-1].index == 1, "nothing follows the end of a choice"
    request.close()


@pytest.mark.parametrize(("continues", "text"), [(True, " world"), (False, "world")])
async def test_an_output_continues_the_word_of_its_prompt(rig, continues, text):
    rig.engine.tokenizer = tokenizer = Tokenizer(sentencepiece())
    params = SamplingParams(continues_prompt=continues, stop=(" x",))
    prompt = [tokenizer.token_to_id(token) for token in ("<s>", "▁Hello", "</s>")]
    (request,) = await rig.engine.submit([prompt], params)
    for token in ("▁world", "▁x"):
        bring(rig, (0, tokenizer.token_to_id(token)))
    (delta,) = request.pop_deltas()
    assert (delta.text, delta.stop_reason) == (text, " x")
    request.close()


async def test_min_tokens_holds_back_stop_strings(rig):
    params = SamplingParams(stop=("dog",), min_tokens=len(ids(rig, "a dog")))
    (request,) = await rig.engine.submit([[5]], params)
    tokens = ids(rig, "a dog") + ids(rig, " dog")
    for token in tokens:
        bring(rig, (0, token))
    deltas = request.pop_deltas()
    assert "".join(delta.text for delta in deltas) == "a dog "
    assert deltas[-1].stop_reason == "dog"
    request.close()


class Compilation:
    """A request of two prompts whose grammar is under way until the test lets it end."""

    def __init__(self):
        self.is_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.rig = Rig(*create_text_engine(ScriptedCompiler(self._compile)))

    async def _compile(self, structured):
        assert structured == CHOICE.structured
        self.is_begun.set()
        await self.may_end.wait()
        return "grammar"

    async def submit(self):
        task = asyncio.create_task(self.rig.engine.submit([[5], [6]], CHOICE, request_id="mine"))
        await self.is_begun.wait()
        return task


async def test_a_compiled_grammar_goes_with_each_prompt():
    compilation = Compilation()
    task = await compilation.submit()
    compilation.may_end.set()
    for request in await task:
        request.close()
    sent = [each for each in compilation.rig.sent if isinstance(each, SubmitRequest)]
    assert [message.sampling.grammar for message in sent] == ["grammar"] * 2


async def test_abort_reaches_requests_whose_grammar_is_being_compiled():
    compilation = Compilation()
    engine = compilation.rig.engine
    task = await compilation.submit()
    assert engine.abort("another") == 0
    assert [engine.abort("mine"), engine.abort("mine")] == [1, 0]
    requests = await task
    taken = []
    for request in requests:
        request.set_listener(lambda request=request: taken.append(request.pop_deltas()))
    assert [[delta.finish_reason for delta in deltas] for deltas in taken] == [["abort"]] * 2
    sent = [type(message) for message in compilation.rig.sent]
    assert sent == [SubmitRequest, SubmitRequest, AbortSequences, AbortSequences]
    for request in requests:
        request.close()
    assert (engine.status().num_requests, engine.abort(None)) == (0, 0)


async def test_abort_reaches_a_request_whose_grammar_has_just_been_compiled():
    async def compile_at_once(_):
        assert engine.abort("mine") == 1
        return "grammar"

    engine, _ = create_text_engine(ScriptedCompiler(compile_at_once))
    (request,) = await engine.submit([[5]], CHOICE, request_id="mine")
    assert [delta.finish_reason for delta in request.pop_deltas()] == ["abort"]
    request.close()


async def test_who_leaves_while_a_grammar_is_compiled_leaves_nothing():
    compilation = Compilation()
    engine = compilation.rig.engine
    task = await compilation.submit()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (compilation.rig.sent, engine.abort(None), engine.status().num_requests) == ([], 0, 0)


async def test_an_engine_that_ends_meanwhile_takes_nothing():
    compilation = Compilation()
    task = await compilation.submit()
    compilation.rig.backend.is_accepting = False
    compilation.may_end.set()
    with pytest.raises(EngineUnavailableError):
        await task
    assert compilation.rig.sent == []


async def test_an_engine_that_has_not_started_takes_nothing():
    engine = Engine(EngineConfig("demo"))
    with pytest.raises(EngineUnavailableError) as refused:
        await engine.submit([[5]], PARAMS)
    assert refused.value.reason == "loading"


def restart(rig, *, is_attached=True):
    """Replace the driver."""
    rig.client.detach("killed")
    rig.sent.clear()
    if is_attached:
        rig.client.attach(rig.sent.append)


async def test_text_and_stop_strings_go_on_over_a_restart(rig):
    params = SamplingParams(stop=("dog",), n=2, max_tokens=50)
    (request,) = await rig.engine.submit([[5]], params)
    texts = {0: "", 1: ""}
    reasons = {}

    def read():
        for delta in request.pop_deltas():
            texts[delta.index] += delta.text
            reasons[delta.index] = delta.finish_reason

    request.set_listener(read)
    first, *rest = ids(rig, "a d")
    bring(rig, (0, first), (1, first))
    restart(rig)
    assert request.num_resumptions == 1
    (again,) = rig.sent
    assert again.outputs == [[first], [first]]
    for token in rest:
        bring(rig, (2, token))
    for token in ids(rig, "og"):
        bring(rig, (2, token))
    assert (texts[0], reasons[0]) == ("a ", "stop"), "the stop string came over the restart"
    assert rig.sent[-1] == AbortSequences([2])
    restart(rig)
    assert [message.choices for message in rig.sent] == [[1]]
    request.close()
    assert rig.engine.status().num_requests == 0


async def test_a_request_during_a_recovery_waits_and_may_be_aborted(rig):
    restart(rig, is_attached=False)
    (kept,) = await rig.engine.submit([[5]], PARAMS)
    (aborted,) = await rig.engine.submit([[6]], PARAMS, request_id="mine")
    embedding = asyncio.ensure_future(rig.engine.embed([7, 8]))
    await asyncio.sleep(0)
    assert rig.engine.status().stats.waiting == 3
    assert rig.engine.abort("mine") == 1
    (delta,) = aborted.pop_deltas()
    assert delta.finish_reason == "abort"
    rig.client.attach(rig.sent.append)
    assert [message.prompt for message in rig.sent] == [[5], [7, 8]]
    bring(rig, (0, 9), ends=[FinishedSequence(0, "length")])
    (delta,) = kept.pop_deltas()
    assert (delta.token_ids, delta.finish_reason) == ([9], "length")
    embedding.cancel()
    await asyncio.gather(embedding, return_exceptions=True)
    assert rig.sent[-1] == AbortSequences([1])
    for request in (kept, aborted):
        request.close()
    assert rig.engine.status().num_requests == 0


async def test_a_prompt_that_kills_workers_refuses_all_prompts_with_it(rig):
    (request,) = await rig.engine.submit([[6]], PARAMS)
    for _ in range(3):
        (message,) = rig.sent
        rig.client.on_death({message.seq})
        restart(rig)
    (delta,) = request.pop_deltas()
    assert (delta.finish_reason, delta.error_kind) == ("error", "poison")
    with pytest.raises(PoisonRequestError):
        await rig.engine.submit([[5], [6]], PARAMS)
    assert [type(message) for message in rig.sent] == [SubmitRequest, AbortSequences]
    request.close()
    assert rig.engine.status().num_requests == 0


def test_the_served_name_is_that_of_the_folder(tmp_path):
    link = tmp_path / "my-model"
    link.mkdir()
    for file in DEMO.iterdir():
        if file.is_file():
            (link / file.name).symlink_to(file)
    engine = Engine(EngineConfig(f"{link}/"))
    assert (engine.model.name, engine.model.root) == ("my-model", f"{link}/")
    assert engine.model.is_named(str(link))
    named = Engine(EngineConfig(str(link)), served_model_name="other")
    assert [named.model.is_named(name) for name in ("other", str(link))] == [True, False]
