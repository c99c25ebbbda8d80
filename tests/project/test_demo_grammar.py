"""The demo model's grammar: the same texts every time, and nothing held out among them.

Pure tests: neither torch nor the trained model is needed.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2
import pytest

from gllm.text.chat.template import ChatTemplate, load_chat_template
from gllm.text.output.registry import select_reasoning_tags, select_tool_call_format
from scripts.demo_model import grammar, metrics, questions, stories
from scripts.demo_model.chat import CHAT_TEMPLATE, Message, render, render_prompt
from scripts.demo_model.templates import expand, template_words, words
from scripts.demo_model.world import HEROES, Split, Statement, all_heroes, is_held_out

pytestmark = pytest.mark.full
SAMPLES = 20_000
HERO_MENTION = re.compile(r"\b([A-Z][a-z]+) (?:the|is an?) ([a-z]+)\b")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """The beginning of the training corpus."""
    return [*grammar.lessons(SAMPLES // 4), *grammar.conversations(SAMPLES - SAMPLES // 4)]


@pytest.fixture(scope="module")
def committed_questions() -> list[dict[str, str]]:
    """The rows of the committed question file."""
    lines = grammar.QUESTIONS_FILE.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("part", [grammar.lessons, grammar.conversations])
def test_same_seed_same_corpus(part: Callable[..., Iterator[str]]) -> None:
    assert list(part(300)) == list(part(500))[:300]


@pytest.mark.parametrize("part", [grammar.lessons, grammar.conversations])
def test_another_seed_another_corpus(part: Callable[..., Iterator[str]]) -> None:
    assert list(part(50)) != list(part(50, seed=99))


def test_committed_questions_are_what_the_grammar_derives() -> None:
    derived = grammar.questions_as_jsonl(grammar.held_out_questions())
    assert grammar.QUESTIONS_FILE.read_text(encoding="utf-8") == derived


def test_committed_questions_are_different_and_complete(
    committed_questions: list[dict[str, str]],
) -> None:
    assert len(committed_questions) == grammar.QUESTION_COUNT == 300
    assert len({row["question"] for row in committed_questions}) == 300
    assert {row["kind"] for row in committed_questions} == set(questions.PASSAGES)


def test_test_questions_rest_on_held_out_statements_only() -> None:
    for question in grammar.held_out_questions():
        assert question.statements
        assert all(is_held_out(statement) for statement in question.statements)


def test_training_passages_rest_on_no_held_out_statement() -> None:
    rng = random.Random(7)
    for _ in range(SAMPLES):
        passage = questions.draw_passage(rng, Split.TRAIN)
        assert not any(is_held_out(statement) for statement in passage.statements)


def test_no_held_out_hero_in_training_texts(texts: list[str]) -> None:
    held_out = {(hero.name, hero.animal.noun) for hero in HEROES[Split.TEST]}
    mentioned = {mention for text in texts for mention in HERO_MENTION.findall(text)}
    assert len(mentioned) > 300
    assert not mentioned & held_out


def test_no_test_question_in_training_texts(
    texts: list[str], committed_questions: list[dict[str, str]]
) -> None:
    everything = "\n".join(texts)
    assert not [row for row in committed_questions if row["question"] in everything]


def test_a_tenth_of_the_heroes_is_held_out() -> None:
    assert len(HEROES[Split.TRAIN]) + len(HEROES[Split.TEST]) == len(all_heroes())
    assert 0.05 < len(HEROES[Split.TEST]) / len(all_heroes()) < 0.15
    assert all(is_held_out(Statement(hero)) for hero in HEROES[Split.TEST])


def test_every_word_of_the_corpus_is_in_the_vocabulary(texts: list[str]) -> None:
    markup = re.compile(r"<\|\w+\|>(?:user|assistant|system)?")
    used = {word for text in texts for word in words(markup.sub(" ", text))}
    assert not used - grammar.vocabulary()


def test_stories_are_of_moderate_length_and_about_their_hero() -> None:
    rng = random.Random(8)
    for _ in range(2000):
        scene = stories.draw_scene(rng)
        story = stories.tell(scene, rng)
        assert 50 <= len(words(story)) <= 150
        assert metrics.tells_about(story, scene.hero.name, scene.hero.animal.noun)
        assert not metrics.repeats_itself(story)


def test_story_heroes_are_half_known_half_held_out() -> None:
    heroes = grammar.story_heroes(20)
    known = [hero in HEROES[Split.TRAIN] for hero in heroes]
    assert known == [True] * 10 + [False] * 10


def test_shipped_chat_template_renders_what_was_trained_on() -> None:
    template = jinja2.Template(CHAT_TEMPLATE)
    messages = [Message("user", "Hi!"), Message("assistant", "Hello!"), Message("user", "Bye.")]
    rows = [{"role": message.role, "content": message.content} for message in messages]
    assert template.render(messages=rows) == render(messages)
    assert template.render(messages=rows, add_generation_prompt=True) == render_prompt(messages)


BEFORE_TOOLS = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The template of the texts that the shipped weights were trained on."""


@pytest.mark.parametrize("first", ["system", "user"])
@pytest.mark.parametrize("prompt", [False, True])
def test_chats_without_tools_render_as_the_weights_were_trained(first: str, prompt: bool) -> None:
    messages = [
        {"role": role, "content": f" {role}'s <tool_call> \n"}
        for role in (first, "user", "assistant", "system", "user")
    ]
    texts = [
        ChatTemplate(source, {}).render(messages, add_generation_prompt=prompt)
        for source in (BEFORE_TOOLS, CHAT_TEMPLATE)
    ]
    assert texts[0] == texts[1]


CALLED = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "<ü>"}'}}
WITH_CALLS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Go."},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALLED, CALLED]},
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    {"role": "user", "content": "Thanks."},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RENDERED_WITH_CALLS = """<|im_start|>system
Be brief.

Tools:
{"name": "f", "parameters": {"type": "object"}}
To call one, answer:
<tool_call>
{"name": NAME, "arguments": {..}}
</tool_call><|im_end|>
<|im_start|>user
Go.<|im_end|>
<|im_start|>assistant
I look.
<tool_call>
{"name": "f", "arguments": {"x": "<ü>"}}
</tool_call>
<tool_call>
{"name": "f", "arguments": {"x": "<ü>"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
sunny
</tool_response><|im_end|>
<|im_start|>user
Thanks.<|im_end|>
"""


def test_the_shipped_template_renders_tools_calls_and_results() -> None:
    folder = Path(__file__).parents[2] / "gllm" / "demo"
    template = load_chat_template(folder)
    assert template is not None
    assert template.render(WITH_CALLS, tools=[TOOL], add_generation_prompt=False) == (
        RENDERED_WITH_CALLS
    )
    family = select_tool_call_format("auto", template.source, template.model_type)
    assert family is not None
    assert family.name == "hermes"
    assert select_reasoning_tags("auto", template.source) is None


def test_expansion_makes_choices_and_fills_slots() -> None:
    rng = random.Random(9)
    seen = {expand("(a|the (big|)) {thing} ( |) .", {"thing": "hat"}, rng) for _ in range(100)}
    assert seen == {"A hat.", "The big hat.", "The hat."}
    assert template_words(["(a|the (big|)) {thing}."]) == {"a", "the", "big"}


def test_no_template_names_an_unknown_slot() -> None:
    rng = random.Random(10)
    told = [stories.tell(stories.draw_scene(rng), rng) for _ in range(2000)]
    assert not [text for text in told if re.search(r"[{}()|]", text)]
