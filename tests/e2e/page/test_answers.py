"""Answers as the chat page shows them: Markdown, code, formulas, reasoning."""

import asyncio
import html
import json
import re
from random import Random

import pytest
from aiohttp import web

from gllm.frontend.routes import page
from scripts import browser
from tests.support.servers.page_user import GatedEngine, User, using

HOSTILE = (
    '<b>bold</b> <img src=x onerror="hit()"> <script>hit()</script>\n\n'
    "[link](javascript:hit()) ![image](https://example.invalid/x.png) <svg onload=hit()>\n\n"
    "```html\n</code></pre><script>hit()</script>\n```\n\n"
    "| <i>a</i> | b |\n| - | - |\n| <a href=javascript:hit()>x</a> | `<u>` |"
)


async def test_html_stays_text(user: User, engine: GatedEngine) -> None:
    await user.tab.evaluate("window.hit = () => console.error('code of the model ran')")
    engine.reply = HOSTILE
    await user.say("<img src=x onerror='hit()'><h3>me</h3>")
    text = await user.answered()
    assert '<img src=x onerror="hit()"> <script>hit()</script>' in text
    assert "</code></pre><script>hit()</script>" in text
    assert "[link](javascript:hit())" in text
    assert "<img src=x onerror='hit()'>" in await user.text(".bubble")
    for tag in ("img", "script", "b", "i", "u", "h3", ".prose svg:not(.icon)", "a[href^=java]"):
        assert await user.count(f"#thread {tag}") == 0, tag
    assert await user.count("#thread a[rel~=noopener]") == 1  # the image's address
    await user.reload()
    await user.tab.until("document.querySelectorAll('.message').length == 2")
    assert (await user.messages())[1] == text
    assert not any("invalid" in url or url.endswith("/x") for url in user.tab.requests)


async def test_reasoning_is_folded_and_shown_like_an_answer(tab: browser.Tab) -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta in (
            {"reasoning_content": "Let **me** "},
            {"reasoning_content": "see:\n- $x^2$\n- <img src=x onerror=hit()>"},
            {"content": "Yes."},
        ):
            chunk = json.dumps({"choices": [{"index": 0, "delta": delta}]})
            await response.write(f"data: {chunk}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "thinker"}]})

    app = web.Application()
    app.router.add_get("/", page.get_chat_page)
    app.router.add_get("/page/{path:.+}", page.get_chat_page_file)
    app.router.add_get("/ready", models)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    async with using(app, tab) as user:
        await user.visit()
        await user.say("Is it?")
        assert await user.answered() == "Yes."
        assert (await user.last("summary")).startswith("Thought for")
        assert await user.last(".thoughts") == ""
        await tab.click(".reasoning summary")
        await tab.until("document.querySelector('.reasoning').open")
        await tab.until("document.querySelector('.thoughts li .katex')")
        shown = "document.querySelector('.thoughts').innerHTML"
        assert (await tab.evaluate(shown)).startswith('<p dir="auto">Let <strong>me</strong> see:')
        assert "&lt;img src=x" in await tab.evaluate(shown)


BOX = '<input type="checkbox" disabled="" aria-label="{}"'.format
MARKDOWN = {
    "a *b* **c** ***d*** `e` ~~f~~": "<p>a <em>b</em> <strong>c</strong> "
    "<em><strong>d</strong></em> <code>e</code> <del>f</del></p>",
    "2 * 3 * 4, a_b_c, **open, ``x`y``": "<p>2 * 3 * 4, a_b_c, **open, <code>x`y</code></p>",
    "\\*a\\* line\nnext": "<p>*a* line<br>next</p>",
    "# One\n### Three": "<h3>One</h3><h5>Three</h5>",
    "- a\n- b\n  - c\n\n  - d": "<ul><li>a</li><li>b<ul><li><p>c</p></li>"
    "<li><p>d</p></li></ul></li></ul>",
    "3. a\n   - b\n4. c": '<ol start="3"><li>a<ul><li>b</li></ul></li><li>c</li></ol>',
    "- a\n\n  b\n\nc": "<ul><li><p>a</p><p>b</p></li></ul><p>c</p>",
    "> a\n> - b": "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "|a|b|\n|:-|-:|\n|1|`x`|": '<div class="table"><table><thead><tr><th class="left">a</th>'
    '<th class="right">b</th></tr></thead><tbody><tr><td class="left">1</td>'
    '<td class="right"><code>x</code></td></tr></tbody></table></div>',
    "a | b\nno table": "<p>a | b<br>no table</p>",
    "<i>&amp;</i>": "<p>&lt;i&gt;&amp;&lt;/i&gt;</p>",
    "- [ ] a\n- [x] **b**\n- [y] c": f'<ul><li class="task">{BOX("Not done")}>a</li>'
    f'<li class="task">{BOX("Done")} checked=""><strong>b</strong></li><li>[y] c</li></ul>',
    "1. [X] a\n\n   b": f'<ol><li class="task"><p>{BOX("Done")} checked="">a</p><p>b</p></li></ol>',
    "[x] a": "<p>[x] a</p>",
}
"""Markup by source, without the directions of texts."""


SHOW = """(async () => {{
    const {{ Markdown }} = await import("/page/markdown.js");
    const [whole, grown] = [document.createElement("div"), document.createElement("div")];
    const text = {};
    new Markdown(whole).show(text);
    const growing = new Markdown(grown);
    for (let end = 0; end <= text.length; end += {}) growing.show(text.slice(0, end), false);
    growing.show(text);
    return [whole.innerHTML, grown.innerHTML];
}})()"""
"""The markup of a text, shown at once and as it grows by so many characters."""


async def markup(user: User, text: str, step: int = 1) -> tuple[str, str]:
    whole, grown = await user.tab.evaluate(SHOW.format(json.dumps(text), step))
    directions = re.compile(' dir="(?:auto|ltr)"')
    return directions.sub("", whole), directions.sub("", grown)


async def test_markdown(user: User) -> None:
    for source, expected in MARKDOWN.items():
        assert await markup(user, source) == (expected, expected), source
    whole, grown = await markup(user, "```none extra\n<b>\n\n  x\n```\nend")
    assert whole == grown
    assert "<span>none</span>" in whole
    assert "<code>&lt;b&gt;\n\n  x</code>" in whole
    for hostile in (
        ">" * 20000,
        "*a " * 20000,
        "[" * 20000,
        "`" * 9999 + "a",
        "- " * 5000,
        "|" * 9999,
        "$" * 20000,
        "$a " * 20000,
        "\\(" * 20000,
        "$$\n" * 9000,
        "\\[\n" * 9000,
    ):
        whole, grown = await markup(user, hostile, 20000)
        assert whole == grown


PIECES = (
    "a",
    "b c",
    " ",
    "\n",
    "\n\n",
    "- ",
    "* ",
    "1. ",
    "> ",
    "# ",
    "```",
    "```py",
    "~~~",
    "|",
    "|-|-|",
    "$$",
    "$",
    "\\[",
    "\\]",
    "\\(",
    "\\)",
    "\\begin{align}",
    "\\end{align}",
    "\\ce{",
    "}",
    "[x] ",
    "x^2",
    "---",
    "===",
    "***",
    "    ",
    "\t",
    "**",
    "_",
    "`",
    "[a]",
    "[a]: ",
    "https://x.y",
    "](",
    ")",
    "[",
    "!",
    "<b>",
    "&amp;",
    "\\",
)


@pytest.mark.full
async def test_a_growing_text_ends_as_the_whole_one(user: User) -> None:
    """A line that is not complete may be taken for another block than it turns out to be."""
    random = Random(5)
    texts = ["".join(random.choices(PIECES, k=random.randint(5, 35))) for _ in range(300)]
    different = await user.tab.evaluate(f"""(async () => {{
        const {{ Markdown }} = await import("/page/markdown.js");
        const shown = (...texts) => {{
            const node = document.createElement("div");
            const markdown = new Markdown(node);
            texts.forEach((text, i) => markdown.show(text, i === texts.length - 1));
            return node.innerHTML;
        }};
        const growing = (text) => [...text].map((_, end) => text.slice(0, end));
        return {json.dumps(texts)}.filter((text) => shown(...growing(text), text) !== shown(text));
    }})()""")
    assert different == []


LINKS = (
    "[a](https://a.example) [b](javascript:hit()) [c](data:text/html,x) ![d](https://d.example/i)"
    " <javascript:hit()> [e](/etc) main.py www.example.com https://f.example/x_y_z [g]\n\n"
    "[![h](https://h.example/i)](https://h.example)\n\n[g]: mailto:g@g.example"
)


@pytest.mark.full
async def test_links_lead_to_the_web_alone(user: User) -> None:
    """A definition behind the text that uses it counts, also while the answer grows."""
    whole, grown = await markup(user, LINKS)
    assert whole == grown
    assert re.findall(r'href="([^"]*)"', whole) == [
        "https://a.example",
        "https://d.example/i",
        "https://f.example/x_y_z",
        "mailto:g@g.example",
        "https://h.example",
    ]
    assert "<img" not in whole
    assert whole.count('rel="noopener noreferrer"') == whole.count("<a ") == 5


@pytest.mark.full
async def test_done_blocks_keep_their_nodes(user: User) -> None:
    """What is selected in an answer stays selected while it grows."""
    kept = await user.tab.evaluate("""(async () => {
        const { Markdown } = await import("/page/markdown.js");
        const node = document.createElement("div");
        const text = "One.\\n\\n```py\\nx = 1\\n```\\n\\n- a\\n- b\\n\\nEnd of it.";
        const markdown = new Markdown(node);
        markdown.show(text.slice(0, text.indexOf("- b")), false);
        const [first, code] = node.children;
        for (let end = text.indexOf("End"); end < text.length; end++) {
            markdown.show(text.slice(0, end), false);
        }
        markdown.show(text);
        return [first === node.children[0], code === node.children[1], node.children.length];
    })()""")
    assert kept == [True, True, 4]


FORMULAS = {
    "a $x^2$ b": ["x^2"],
    "\\(y\\) and \\[z\\]": ["y", "z"],
    "Let\n$$\na\n- b\n= c\n$$\nbe.": ["a - b = c"],
    "- item\n  $$\n  a\n  + b\n  $$\n- next $c$": ["a + b", "c"],
    "> \\[ a \\]\n> text": ["a"],
    "| $a$ | b |\n|-|-|\n| 1 | $$c$$ |": ["a", "c"],
    "from $5 to $10, $5-$10, US$5 or 6$, \\$a$, `$x$`, $ x $": [],
    "$$ opens nothing\n\nand $$ neither": [],
    "```\n$x$\n```": [],
}


@pytest.mark.full
async def test_formulas(user: User) -> None:
    await user.tab.evaluate("import('/page/vendor/katex/katex.min.js').then(() => 0)")
    await markup(user, "$x$")
    await user.tab.until("window.katex")
    for source, formulas in FORMULAS.items():
        whole, grown = await markup(user, source)
        assert whole == grown, source
        found = re.findall(r"<annotation[^>]*>([^<]*)</annotation>", whole)
        assert [" ".join(tex.split()) for tex in found] == formulas, source
    # Names of style, of which the page's policy allows no attribute, and of what is not trusted.
    whole, _ = await markup(user, r"$\pmb{x}\fcolorbox{red}{blue}{y}\vec{z}$")
    assert "text-shadow" in whole
    for hostile in (
        r"\href{javascript:hit()}{x}",
        r"\url{https://x.example}",
        r"\includegraphics{https://x.example/i.png}",
        r"\htmlStyle{color:red}{x}",
        r"\htmlClass{message}{x}",
        r"\htmlId{input}{x}",
    ):
        whole, _ = await markup(user, f"${hostile}$")
        for forbidden in ("href", "<img", 'id="', "color:red", "message"):
            assert forbidden not in re.sub(
                r"<annotation.*?</annotation>|<m?text>.*?</m?text>|>[^<]*<", "><", whole
            ), hostile
    bombs = (r"\def\a{\a\a}\a", r"\def\a{" + "x" * 3000 + "}" + r"\a" * 300, "{" * 2000, r"\frac{")
    for bomb in bombs:
        whole, _ = await markup(user, f"${bomb}$", 9999)
        assert 'class="broken"' in whole, bomb
        assert len(whole) < 5000
    whole, _ = await markup(user, r"$\rule{1000em}{1000em}$")
    assert "1000em" not in re.sub(r"<annotation.*?</annotation>", "", whole)


ALIGNED = "\\begin{align}\na &= b \\\\\n+ c\n\\end{align}"
WITHOUT_DELIMITERS = {
    f"So\n{ALIGNED}\nends.": [ALIGNED],
    f"So {ALIGNED.replace(chr(10), ' ')}.": [ALIGNED],
    f"- item\n  {ALIGNED.replace(chr(10), chr(10) + '  ')}\n- next": [ALIGNED],
    f"$$\n{ALIGNED}\n$$": [ALIGNED],
    "\\(x =\n\\begin{cases}\na\n\\end{cases}\n\\)": ["x = \\begin{cases} a \\end{cases}"],
    "\\begin{pmatrix}\\begin{pmatrix}a\\end{pmatrix}\nb\\end{pmatrix}": [
        "\\begin{pmatrix}\\begin{pmatrix}a\\end{pmatrix} b\\end{pmatrix}"
    ],
    "\\begin{document}a\\end{document} \\begin{align}\n\nb\\end{align}": [],
    f"```\n{ALIGNED}\n```\n`\\ce{{H2O}}` \\cel{{H}} \\ce{{H\n2}}": [],
    "Water \\ce{H2O} \\{a, $\\ce{SO4^{2-}}$ and \\pu{1.5 mol}": [
        "\\ce{H2O}", "\\ce{SO4^{2-}}", "\\pu{1.5 mol}",
    ],
}  # fmt: skip
"""The formulas in a text, by text."""


@pytest.mark.full
async def test_environments_and_chemistry_need_no_delimiters(user: User) -> None:
    await markup(user, "$x$ \\ce{H2O}")
    loaded = "performance.getEntriesByType('resource').some(({ name }) => name.includes('mhchem'))"
    await user.tab.until(loaded)
    await user.tab.evaluate("import('/page/vendor/katex/mhchem.min.js').then(() => 0)")
    for source, formulas in WITHOUT_DELIMITERS.items():
        whole, grown = await markup(user, source)
        assert whole == grown, source
        assert 'class="broken"' not in whole, source
        found = re.findall(r"<annotation[^>]*>([^<]*)</annotation>", whole)
        expected = [" ".join(tex.split()) for tex in formulas]
        assert [" ".join(html.unescape(tex).split()) for tex in found] == expected, source
    # Atoms are upright and their numbers are below: the macro is known.
    whole, _ = await markup(user, "\\ce{H2O}")
    assert '<mi mathvariant="normal">H</mi>' in whole
    assert "<msub>" in whole
    for hostile in (
        r"\ce{\href{javascript:hit()}{x}}",
        r"\ce{" * 800 + "}" * 800,
        r"\ce{" + "H2->" * 900 + "}",
        r"\ce{$\htmlId{input}{x}$}",
        r"\begin{align}\href{javascript:hit()}{x}\end{align}",
    ):
        whole, _ = await markup(user, hostile, 9999)
        assert not re.search(r'href=|id="', re.sub(r">[^<]*<", "><", whole)), hostile
    for hostile in (
        "\\begin{align}" * 9000 + "\\end{align}",
        "\\begin{align}\n" * 2000,
        "$x\n\\begin{align}a\n" * 1000,
        "\\ce{" * 20000,
        "- [x] " * 5000,
    ):
        whole, grown = await markup(user, hostile, 20000)
        assert whole == grown


HEBREW = "שלום world"


async def test_texts_have_the_direction_of_their_language(user: User, engine: GatedEngine) -> None:
    """Also a line of another language in a list, and a text that begins with code."""
    engine.reply = f"{HEBREW}\n\n`a` {HEBREW}\n\nHello\n\n- {HEBREW}\n- Hi\n\n```\n{HEBREW}\n```"
    await user.say(HEBREW)
    await user.answered()
    directions = """[...document.querySelectorAll(
        '.bubble, .prose > *, .prose li, #conversations .title, #input')].map(
        (node) => getComputedStyle(node).direction)"""
    assert await user.tab.evaluate(directions) == [
        "rtl", "rtl", "rtl", "rtl", "ltr", "rtl", "rtl", "rtl", "ltr", "ltr",
    ]  # fmt: skip
    await user.tab.click("#input")
    await user.tab.type(HEBREW)
    assert await user.tab.evaluate("getComputedStyle(input).direction") == "rtl"


@pytest.mark.full
async def test_formulas_are_shown_in_an_answer(user: User, engine: GatedEngine) -> None:
    engine.reply = r"So $a^2$ is" + "\n\n$$\nc^2\n$$"
    await user.say("Hi")
    await user.answered()
    await user.tab.until("document.querySelectorAll('.prose math').length == 2")
    await user.tab.until("document.fonts.check('16px KaTeX_Math')")
    assert any(url.endswith(".woff2") for url in user.tab.requests)
    assert all(url.startswith((user.url, "data:")) for url in user.tab.requests)


async def test_code_is_highlighted(user: User, engine: GatedEngine) -> None:
    """Once its block is complete; a growing block stays plain."""
    engine.gate = asyncio.Semaphore(0)
    code = 'def greet(name):\n    return f"Hi {name}"  # <b>\n'
    engine.reply = f"```py\n{code}```\n\nand\n\n```none\nplain\n```\n\n```js\nlet x = 1;\n```"
    await user.say("Hi")
    for _ in range(25):
        engine.gate.release()
    await user.tab.until("document.querySelector('.code code')?.innerText.includes('def')")
    assert await user.count(".code span[class]") == 0
    for _ in range(1000):
        engine.gate.release()
    await user.answered()
    await user.tab.until("document.querySelectorAll('.code')[2].querySelector('.code-keyword')")
    await user.tab.until("document.querySelector('.code .code-comment')")
    figures = "[...document.querySelectorAll('.code code')].map((node) => node.textContent)"
    assert await user.tab.evaluate(figures) == [code.rstrip("\n"), "plain", "let x = 1;"]
    assert await user.tab.evaluate("document.querySelector('.code-keyword').innerText") == "def"
    names = [url.rpartition("/")[2] for url in user.tab.requests if "/languages/" in url]
    assert sorted(names) == ["javascript.min.js", "python.min.js", "xml.min.js"]


@pytest.mark.full
async def test_events_are_read_however_they_are_cut(user: User) -> None:
    body = 'data: {"a": "é"}\n\n: comment\ndata:x\ndata: y\r\n\r\nevent: z\rdata: end\r\r'
    wanted = ['{"a": "é"}', "x\ny", "end"]
    found = await user.tab.evaluate(f"""(async () => {{
        const {{ EventParser, eventsOf }} = await import("/page/sse.js");
        const body = {json.dumps(body)} + "\\n";
        const all = [];
        for (let cut = 0; cut <= body.length; cut++) {{
            const parser = new EventParser();
            all.push([...parser.push(body.slice(0, cut)), ...parser.push(body.slice(cut))]);
        }}
        const bytes = new TextEncoder().encode(body);
        const stream = new ReadableStream({{
            start(to) {{ bytes.forEach((byte) => to.enqueue(Uint8Array.of(byte))); to.close(); }},
        }});
        const last = [];
        for await (const data of eventsOf(new Response(stream))) last.push(data);
        return [...all, last];
    }})()""")
    assert all(events == wanted for events in found)
    assert len(found) == len(body) + 3
