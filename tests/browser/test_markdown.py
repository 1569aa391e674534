"""Markdown is rendered, and hostile text takes no long time."""

from __future__ import annotations

import pytest

from aengine.types import Fragment
from tests.browser.chromium import Tab
from tests.browser.talking import ENDED, answer, ask, finish, talking_to
from tests.http.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

EXAMPLE = 'target="_blank" rel="noopener noreferrer" referrerpolicy="no-referrer"'


def link(href: str, text: str) -> str:
    return f'<a href="{href}" title="{href}" {EXAMPLE}>{text}</a>'


def code(text: str, language: str = "") -> str:
    head = f'<div><span>{language}</span><button type="button">Copy</button></div>'
    return f'<div class="code">{head}<pre><code>{text}</code></pre></div>'


def reference(number: int) -> str:
    return f'<sup><button type="button" class="note" aria-label="Footnote {number}">{number}</button></sup>'


def notes(*texts: str) -> str:
    backs = [f'<button type="button" class="note" aria-label="Back to reference {n + 1}">↩</button>' for n in range(9)]
    items = "".join(f"<li>{text}{back}</li>" for text, back in zip(texts, backs, strict=False))
    return f'<section class="notes" aria-label="Footnotes"><ol>{items}</ol></section>'


def task(done: bool, text: str) -> str:
    box = f'<span class="box" role="img" aria-label="{"done" if done else "to do"}">{"☑" if done else "☐"}</span>'
    return f'<li class="task">{box}{text}</li>'


def math(text: str) -> str:
    return f'<span class="math">{text}</span>'


# The constructs of CommonMark and GFM by their names there, and further ones that models write.
CONSTRUCTS = {
    "thematic break": {"a\n***\nb": "<p>a</p><hr><p>b</p>", "- - -": "<hr>"},
    "ATX heading": {"# A\n### *B* ##\n#no": "<h3>A</h3><h5><em>B</em></h5><p>#no</p>"},
    "setext heading": {"a\n===\nb\nc\n---\nd": "<h3>a</h3><h4>b\nc</h4><p>d</p>"},
    "indented code": {"a\n\n    b\n\n      c\n\nd": "<p>a</p>" + code("b\n\n  c") + "<p>d</p>"},
    "fenced code": {"```x\na\n\n*b*\n```\nc\n~~~\nd": code("a\n\n*b*", "x") + "<p>c</p>" + code("d")},
    "HTML is text": {"<b>a</b>\n<!-- b -->": "<p>&lt;b&gt;a&lt;/b&gt;\n&lt;!-- b --&gt;</p>"},
    "reference link": {
        "[a b][1], [B], [b][]\n\n[1]: https://a.org\n[b]: <https://b.org> 'c'": "<p>"
        + ", ".join((link("https://a.org/", "a b"), link("https://b.org/", "B"), link("https://b.org/", "b")))
        + "</p>",
        "[a]\n\n[b]: https://b.org": f"<p>[a]</p><p>[b]: {link('https://b.org/', 'https://b.org')}</p>",
        "[a]\n\n[a]: javascript:b": "<p>[a]</p><p>[a]: javascript:b</p>",
    },
    "paragraph": {"one\n\n  two\n   lines": "<p>one</p><p>two\nlines</p>"},
    "block quote": {
        "> a\nb\n> > c\n\nd": "<blockquote><p>a\nb</p><blockquote><p>c</p></blockquote></blockquote><p>d</p>"
    },
    "list item": {
        "1. a\n\n   b\n\n       c": "<ol><li><p>a</p><p>b</p>" + code("c") + "</li></ol>",
        "-\n- a": "<ul><li></li><li>a</li></ul>",
    },
    "list": {
        "- a\n- b\n  - c\n\n- d": "<ul><li><p>a</p></li><li><p>b</p><ul><li>c</li></ul></li><li><p>d</p></li></ul>",
        "3. a\n4. b\nc\n- d": '<ol start="3"><li>a</li><li>b\nc</li></ol><ul><li>d</li></ul>',
        "1. a\n  - b": "<ol><li>a<ul><li>b</li></ul></li></ol>",
    },
    "backslash escape": {"\\*a\\* \\# \\\\ \\a": "<p>*a* # \\ \\a</p>"},
    "entity": {"&lt;b&gt; &copy; &#8364;&#x41; &Eacute;&alpha;&ne; &no;": "<p>&lt;b&gt; © €A Éα≠ &amp;no;</p>"},
    "code span": {"`a*b*` ``c`d`` ` e ` `f": "<p><code>a*b*</code> <code>c`d</code> <code>e</code> `f</p>"},
    "emphasis": {
        "**a** *b* ***c*** __d__ _e_": (
            "<p><strong>a</strong> <em>b</em> <em><strong>c</strong></em> <strong>d</strong> <em>e</em></p>"
        ),
        "**a *b*** *c**d**e*": "<p><strong>a <em>b</em></strong> <em>c<strong>d</strong>e</em></p>",
        "2 * 3 * 4, snake_case_name, **open": "<p>2 * 3 * 4, snake_case_name, **open</p>",
        "**中文。**后面": "<p><strong>中文。</strong>后面</p>",
    },
    "link": {
        '[a **b**](https://a.org/x_(y) "t")': "<p>" + link("https://a.org/x_(y)", "a <strong>b</strong>") + "</p>",
        "[a [b](https://b.org) c](d)": f"<p>[a {link('https://b.org/', 'b')} c](d)</p>",
        "[x](javascript:a)": "<p>[x](javascript:a)</p>",
    },
    "image as a link": {"![a](https://a.org/b.png)": "<p>" + link("https://a.org/b.png", "a") + "</p>"},
    "autolink": {"<https://a.org/b>": "<p>" + link("https://a.org/b", "https://a.org/b") + "</p>"},
    "hard line break": {"a  \nb\\\nc": "<p>a<br>b<br>c</p>"},
    "soft line break": {"a\nb": "<p>a\nb</p>"},
    "line break in HTML": {"a<br>b<BR />c": "<p>a<br>b<br>c</p>"},
    "task list": {"- [ ] a\n- [x] b\n- [y] c": f"<ul>{task(False, 'a')}{task(True, 'b')}<li>[y] c</li></ul>"},
    "strikethrough": {"~~a *b*~~ ~c~ 1~2": "<p><del>a <em>b</em></del> ~c~ 1~2</p>"},
    "extended autolink": {
        "https://a.org/b, (www.c.org).": (
            f"<p>{link('https://a.org/b', 'https://a.org/b')}, ({link('http://www.c.org/', 'www.c.org')}).</p>"
        )
    },
    "footnote": {
        "a[^x]b[^1][^no]\n\n[^1]: one\n[^x]: two\n\n    more": f"<p>a{reference(1)}b{reference(2)}[^no]</p>"
        + notes("<p>two</p><p>more</p>", "<p>one</p>"),
        "[^a]: b": "<div><p>[^a]: b</p></div>",
    },
    "formula": {
        r"\(x^2\) \[a_1*b*c\] $a*b*c$ $5, $6": (
            "<p>" + " ".join(map(math, (r"\(x^2\)", r"\[a_1*b*c\]", "$a*b*c$"))) + " $5, $6</p>"
        ),
        "$$\na \\\\\nb\n$$": "<p>" + math("$$\na \\\\\nb\n$$") + "</p>",
        r"as it comes: \(x^2": r"<p>as it comes: \(x^2</p>",
    },
}


def table(header: str, *rows: str) -> str:
    body = f"<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody>" if rows else "<tbody></tbody>"
    return f'<div class="table"><table><thead><tr>{header}</tr></thead>{body}</table></div>'


AB = '<th scope="col">a</th><th scope="col">b</th>'
TABLES = {
    "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |": table(AB, "<td>1</td><td>2</td>", "<td>3</td><td>4</td>"),
    "a | b\n- | -\n1 | 2": table(AB, "<td>1</td><td>2</td>"),
    "| a | b | c |\n|:--|--:|:-:|\n| 1 | 2 | 3 |": table(
        '<th scope="col" class="left">a</th><th scope="col" class="right">b</th><th scope="col" class="center">c</th>',
        '<td class="left">1</td><td class="right">2</td><td class="center">3</td>',
    ),
    "| a | b |\n|---|---|\n| 1 |\n| 1 | 2 | 3 |\n| |\nx": table(
        AB, "<td>1</td>", "<td>1</td><td>2</td>", "<td></td>", "<td>x</td>"
    ),
    "| a | b |\n|---|---|\n| **x** `y` | p\\|q `r\\|s` |": table(
        AB, "<td><strong>x</strong> <code>y</code></td><td>p|q <code>r|s</code></td>"
    ),
    "Look:\n| a | b |\n|---|---|\n| 1 | 2 |\n\ndone": (
        "<p>Look:</p>" + table(AB, "<td>1</td><td>2</td>") + "<p>done</p>"
    ),
    "| a | b |\n|---|---|\n| 1 | 2 |\n# x": table(AB, "<td>1</td><td>2</td>") + "<h3>x</h3>",
    "> | a | b |\n> |---|---|": "<blockquote>" + table(AB) + "</blockquote>",
    "- | a | b |\n  |---|---|": "<ul><li>" + table(AB) + "</li></ul>",
    "| a | b |\n|---|": "<p>| a | b |\n|---|</p>",  # a table needs the same number of cells in its second line
    "| a | b |": "<p>| a | b |</p>",
    "| a |\n|---|\n| b<br>c |": table('<th scope="col">a</th>', "<td>b<br>c</td>"),
    "| a |\n| b |": "<p>| a |\n| b |</p>",
    "a | b\n--x|---": "<p>a | b\n--x|---</p>",
}


async def test_rendering(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    wrong = {}
    async with talking_to(engine, tab):
        for construct, cases in (CONSTRUCTS | {"table": TABLES}).items():
            for text, expected in cases.items():
                await answer(tab, engine, text)
                shown = await tab.evaluate("document.querySelector('.turn:last-child .prose').innerHTML")
                if shown != expected:
                    wrong[construct, text] = shown, expected
    assert wrong == {}


async def test_code_has_a_language_and_a_button_that_copies(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab) as url:
        await tab.allow("clipboardReadWrite", url)
        await answer(tab, engine, "1. See:\n   ```python\n   if a:\n       b()\n   ```\n2. Done")
        assert await tab.text(".prose li .code span") == "python"
        assert await tab.text(".prose li pre code") == "if a:\n    b()"
        await tab.click(".prose .code button")
        await tab.until("document.querySelector('.prose .code button').textContent === 'Copied'")
        assert await tab.evaluate("navigator.clipboard.readText()") == "if a:\n    b()"


COLOURED = {
    "python": (
        'def f(): return "a" # b\n"""c',
        ["keyword def", "keyword return", 'string "a"', "comment # b", 'string """c'],
    ),
    "ts": ("const a = `b` + 0x1F; /* c", ["keyword const", "string `b`", "number 0x1F", "comment /* c"]),
    "SQL": ("select 'it''s' -- a", ["keyword select", "string 'it''s'", "comment -- a"]),
    "sh": ("if a#b; then # c", ["keyword if", "keyword then", "comment # c"]),
    "rust": ("fn f<'a>() { 'b' }", ["keyword fn", "string 'b'"]),
    "c++": ("#include <a>\nint x = 1.5f;", ["keyword #include", "keyword int", "number 1.5f"]),
    "html": (
        '<a href="b">c</a><!-- d',
        ["keyword <a", 'string "b"', "keyword >", "keyword </a", "keyword >", "comment <!-- d"],
    ),
    "json": ('{"a": [1e5, true]}', ['string "a"', "number 1e5", "keyword true"]),
    "diff": ("+a\n-b\n c", ["added +a\n", "removed -b\n"]),
    "unknown": ('if "a"', []),
}


async def test_code_is_coloured(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    spans = (
        "[...document.querySelectorAll('.turn:last-child code span')]"
        ".map((one) => `${one.className} ${one.textContent}`)"
    )
    wrong = {}
    async with talking_to(engine, tab):
        for language, (text, expected) in COLOURED.items():
            await answer(tab, engine, f"```{language}\n{text}\n```")
            assert await tab.text(".turn:last-child code") == text
            if (shown := await tab.evaluate(spans)) != expected:
                wrong[language] = shown
    assert wrong == {}


async def test_links_lead_to_the_web_and_say_nothing_of_where_they_stood(tab: Tab) -> None:
    text = "[a **b**](https://example.org/x_(y)) and http://example.org/z, or <https://example.org>."
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await answer(tab, engine, text)
        links = await tab.evaluate("[...document.links].map((a) => [a.href, a.textContent, a.target, a.rel])")
    assert links == [
        ["https://example.org/x_(y)", "a b", "_blank", "noopener noreferrer"],
        ["http://example.org/z", "http://example.org/z", "_blank", "noopener noreferrer"],
        ["https://example.org/", "https://example.org", "_blank", "noopener noreferrer"],
    ]


async def test_what_is_finished_keeps_its_place_while_more_comes(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await ask(tab, "hi")
        stream = await engine.next_stream()
        stream.put(Fragment("# Title\n\n```\nfirst", (1,)))
        await tab.until("document.querySelector('.prose code')")
        await tab.evaluate(
            "window.seen = [document.querySelector('.prose h3'), document.querySelector('.prose code')]; 0"
        )
        stream.put(Fragment(" and second\n```\nthen *th", (1,)))
        await tab.until("document.querySelector('.prose p')?.textContent === 'then *th'")
        finish(stream, "is*")
        await tab.until("document.querySelector('.prose em')")
        assert await tab.evaluate(
            "seen[0] === document.querySelector('.prose h3') && seen[1] === document.querySelector('.prose code')"
        )
        assert await tab.text(".prose code") == "first and second"


async def test_a_table_grows_row_by_row(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await ask(tab, "hi")
        stream = await engine.next_stream()
        stream.put(Fragment("first\n\n| a | b |\n|--", (1,)))
        await tab.until("document.querySelector('.prose p + p')")
        await tab.evaluate("window.seen = document.querySelector('.prose p'); 0")
        stream.put(Fragment("-|---|\n| 1 | t", (1,)))
        await tab.until("document.querySelector('.prose td + td')?.textContent === 't'")
        stream.put(Fragment("wo |\n| 3", (1,)))
        await tab.until("document.querySelectorAll('.prose tbody tr').length === 2")
        finish(stream, " | 4 |\n\nend")
        await tab.until("document.querySelector('.table + p')")
        cells = await tab.evaluate("[...document.querySelectorAll('.prose td')].map((cell) => cell.textContent)")
        assert cells == ["1", "two", "3", "4"]
        assert await tab.evaluate("seen === document.querySelector('.prose p')")


@pytest.mark.alone
@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000_000,
        "[a](" * 20_000,
        "*a " * 30_000,
        "*" * 60_000 + "a",
        "_a" * 30_000,
        "".join("`" * length + " " for length in range(1, 350)),
        ">" * 60_000,
        "- " * 30_000,
        "  " * 30_000 + "- a",
        "- a\n" + "\n" * 60_000 + "- b",
        "**a* " * 12_000,
        "```" + "a" * 60_000 + "`",
        "# a" + " " * 150_000 + "b",
        "- - " * 15_000 + "a",
        "|" * 60_000 + "\n" + "|-" * 60_000,
        "|a" * 5_000 + "|\n" + "|-" * 5_000 + "|\n" + "|\n" * 20_000,
        "a|b\n" * 15_000,
        "|" + " \t" * 30_000 + "\n|" + " \t" * 30_000 + "-x",
        "\\|" * 30_000 + "\n-|-",
        "*a _b " * 10_000 + "c_ d* " * 10_000,
        "*a **b " * 10_000 + "c** d*" * 10_000,
        "![" * 30_000 + "](http://a.b)" * 3_000,
        "[a]: http://a.b\n" * 4_000 + "[a] " * 20_000,
        "".join(f"[^{n}] " for n in range(1500)) + "".join(f"\n[^{n}]: a" for n in range(1500)),
        "http://%" * 20_000,
        "- a\nb\n" * 10_000,
        "```js\n" + "/*`'" * 12_000,
    ],
    ids=lambda text: text[:6].strip(),
)
async def test_a_text_made_to_take_long_takes_no_longer(tab: Tab, text: str) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        await ask(tab, "hi")
        stream = await engine.next_stream()
        await tab.until("!document.querySelector('.dot').hidden")
        await tab.evaluate(
            """new PerformanceObserver((list) => list.getEntries().forEach((one) => window.longest = Math.max(
            window.longest ?? 0, one.duration))).observe({ type: "longtask" }); 0"""
        )
        finish(stream, text)
        await tab.until(ENDED)
        await tab.evaluate("new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))")
        assert (await tab.evaluate("window.longest ?? 0")) < 3000  # milliseconds
