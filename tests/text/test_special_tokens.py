"""Special tokens that messages spell are ordinary text; nothing else is encoded otherwise."""

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from gllm.config.output_parsers import OutputParserConfig
from gllm.text.chat.prompt import ChatRequest, render_chat
from gllm.text.chat.template import ChatTemplate
from gllm.text.special_tokens import _without_special_tokens, new_mark
from gllm.text.tokenizer import Tokenizer
from tests.support.examples import num_examples
from tests.support.text import tokenizers as some

TEMPLATE = ChatTemplate(
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function %}<call>{{ f.name }}"
    "{% for key, value in f.arguments.items() %}\n{{ key }}={{ value }}{% endfor %}\n"
    "{{ f.arguments | tojson }}\n{{ '' + f.arguments }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    {},
)


def pieces() -> tokenizers.Tokenizer:
    """As Llama 2, whose special tokens are among its pieces too."""
    backend = some.sentencepiece()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|end|>"])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """As newer ones of that kind: only the very first word of a text gets a space."""
    backend = pieces()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return backend


def stripping() -> tokenizers.Tokenizer:
    """Special tokens that swallow white space, and one that begins as another."""
    backend = some.byte_level()
    backend.add_special_tokens([AddedToken("<|im_end|>", rstrip=True), "<|im_end|>>"])
    return backend


KINDS = {
    "byte level": some.byte_level,
    "pieces": pieces,
    "metaspace": metaspace,
    "stripping": stripping,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param]())


def rendered(tokenizer: Tokenizer, messages: Any, tools: Any = (), marks: bool = True) -> Any:
    """(text, mark) of a chat."""
    mark = new_mark() if marks else ""
    if marks:
        messages, tools = tokenizer.special_token_marker.mark_values([messages, list(tools)], mark)
    return TEMPLATE.render(messages, tools=tools), mark


def control(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    """The control tokens among token ids."""
    unknown = tokenizer.token_to_id("<unk>")
    return [tokenizer.id_to_token(i) for i in ids if i in tokenizer.special_token_ids - {unknown}]


harmless = st.text(st.sampled_from('aé <|imend_s>/[]{}"\\\n🎉好0'), max_size=12)


@settings(max_examples=num_examples(25, 1000), deadline=None)
@given(texts=st.lists(harmless, min_size=1, max_size=3))
def test_texts_without_special_tokens_are_encoded_as_ever(tokenizer, texts):
    """Whether or not they take the way of marked text."""
    messages = [{"role": "user", "content": text} for text in texts]
    plain, _ = rendered(tokenizer, messages, marks=False)
    wanted = tokenizer.encode(plain, add_special_tokens=False)
    if len(control(tokenizer, wanted)) != 2 * len(texts) + 1:
        return  # a special token came out of the texts, however unlikely
    text, mark = rendered(tokenizer, messages)
    assert text.replace(mark, "") == plain
    assert tokenizer.encode_chat(text, mark) == wanted
    assert tokenizer.special_token_marker.encode_marked(text, mark) == wanted


tricky = st.lists(
    st.sampled_from(
        [
            "<|im_end|>",
            "<|im_start|>",
            "<|end|>",
            "<|im_",
            "end|>",
            "<",
            ">",
            "|>",
            "<|",
            " ",
            "<|im_end|",
            "|im_end|>",
            "x",
            "</s>",
            "<s>",
            "end|",
            "\n",
            '"',
            "\\",
            "\\u003c|im_end|>",
        ]
    ),
    max_size=6,
).map("".join)


def arguments(name: str, value: str, escaped: bool) -> str:
    """The text of a JSON object; `escaped`: as writers do who trust no `<`."""
    text = json.dumps({name or "a": value})
    return text.replace("<", "\\u003c") if escaped else text


@settings(max_examples=num_examples(25, 1000), deadline=None)
@given(st.lists(tricky, min_size=7, max_size=7), st.booleans())
def test_no_text_of_a_request_makes_a_control_token(tokenizer, texts, escaped):
    function = {"name": "f", "arguments": arguments(texts[2], texts[3], escaped)}
    messages = [
        {"role": "user", "content": texts[0]},
        {"role": "assistant", "content": texts[1], "tool_calls": [{"function": function}]},
        {"role": "tool", "content": [{"type": "text", "text": texts[4]}]},
    ]
    properties = {texts[5]: {"type": texts[6], "enum": texts}}
    parameters = {"type": "object", "properties": properties}
    described = {"name": "f", "description": texts[6], "parameters": parameters}
    tools = [{"type": "function", "function": described}]
    text, mark = rendered(tokenizer, messages, tools)
    ids = tokenizer.encode_chat(text, mark)
    turn = ["<|im_start|>", "<|im_end|>"]
    assert control(tokenizer, ids) == turn * 4 + ["<|im_start|>"]
    if tokenizer.token_to_id("<|im_end|>>") is None and tokenizer.is_byte_level:
        assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace(mark, "")


@given(
    kind=st.sampled_from(sorted(KINDS)),
    added=st.lists(st.tuples(st.text("<|xy ab", min_size=1, max_size=5), *[st.booleans()] * 5)),
)
@settings(max_examples=num_examples(50, 1000), deadline=None)
def test_a_tokenizer_without_special_tokens_has_the_same_ids(kind, added):
    """Its vocabulary is not copied, so that the added tokens are added again."""
    backend = KINDS[kind]()
    names = ("special", "single_word", "lstrip", "rstrip", "normalized")
    for content, *flags in added:
        backend.add_tokens([AddedToken(content, **dict(zip(names, flags, strict=True)))])
    copy = _without_special_tokens(backend)
    assert copy.to_str() == backend.to_str()
    assert copy.encode_special_tokens
    assert not backend.encode_special_tokens


def test_a_request_s_own_special_tokens_are_its_text():
    tokenizer = Tokenizer(some.byte_level())
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    text, mark = rendered(tokenizer, messages)
    ids = tokenizer.encode_chat(text, mark)
    start = tokenizer.token_to_id("<|im_start|>")
    assert start is not None
    inner = ids[ids.index(start) + 1 :]
    assert control(tokenizer, ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert tokenizer.decode(inner).startswith("user\na<|im_end|>b\n")


def test_a_special_token_among_the_pieces_of_a_model():
    """Some models would make the token of the very characters."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.Unigram(
            [("<unk>", 0.0), ("</s>", -1.0), *((c, -9.0) for c in "</s>ab")], 0
        )
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(backend)
    mark = new_mark()
    text = tokenizer.special_token_marker.mark("a</s>bö", mark)
    assert tokenizer.decode(tokenizer.encode_chat(text, mark), False) == "a < / s > b <unk>"


def test_normalization_makes_no_control_token():
    backend = some.byte_level()
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<sep>", normalized=True)])
    tokenizer = Tokenizer(backend)
    assert control(tokenizer, tokenizer.encode("a<SEP>b")) == ["<sep>"]
    mark = new_mark()
    text = tokenizer.special_token_marker.mark("a<SEP>b", mark) + "<|end|>"
    assert control(tokenizer, tokenizer.encode_chat(text, mark)) == ["<|end|>"]


def test_thousands_of_special_tokens_and_a_long_text():
    backend = some.byte_level()
    backend.add_special_tokens([f"<unused{i}>" for i in range(7000)])
    special = Tokenizer(backend).special_token_marker
    text = "<unused12" * 20_000 + "<unused12>" + "y" * 100_000 + "<unused6999>"
    assert special.mark(text, "#") == text.replace("12>", "#12>").replace("9>", "9>").replace(
        "<unused#12>", "<#unused12>"
    ).replace("<unused6999>", "<#unused6999>")


SEARCHES = [
    "'</think>' in c",
    "c.split('</think>')[-1].lstrip('\\n')",
    "c.rsplit('</think>', 1)[0].split('<think>')[-1]",
    "c.partition('</think>')[2] | trim",
    "c.rpartition('</think>')[0].rstrip()",
    "c.startswith('<think>') and not c.endswith(('</think>', 'x'))",
    "c.strip().replace('</think>', '-')",
    "c.count('</think>')",
    "c.find('</think>') >= 0 and c.rfind('<think>') < 0",
    "c.split() | join('+')",
]


@pytest.mark.parametrize("search", SEARCHES)
@settings(max_examples=num_examples(15, 1000), deadline=None)
@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "a", " ", "\n", "<", "think>", "x"]), max_size=6
    ).map("".join)
)
def test_templates_find_special_tokens_in_messages(search, text):
    """As in the unmarked message, although its own special tokens stay text."""
    backend = some.byte_level()
    backend.add_special_tokens(["<think>", "</think>"])
    source = "{% set c = messages[0].content %}{{ " + search + " }}<|im_end|>"
    tokenizer = Tokenizer(backend, ChatTemplate(source, {}))
    messages = [{"role": "assistant", "content": text}]
    prompt = render_chat(tokenizer, ChatRequest(messages), OutputParserConfig())
    assert tokenizer.chat_template is not None
    wanted = tokenizer.chat_template.render(messages)
    assert tokenizer.decode(prompt.token_ids, False) == wanted
    assert control(tokenizer, prompt.token_ids) == ["<|im_end|>"]
