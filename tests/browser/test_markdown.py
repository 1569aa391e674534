"""What of Markdown is rendered, and that a text made to take long does not."""

from __future__ import annotations

import pytest

from aengine.types import Fragment
from tests.browser.chromium import Tab
from tests.browser.talking import answer, ask, finish, talking_to
from tests.http.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

RENDERED = {
    "one\n\ntwo\nlines": "<p>one</p><p>two\nlines</p>",
    "**a** *b* ***c*** __d__ _e_": (
        "<p><strong>a</strong> <em>b</em> <em><strong>c</strong></em> <strong>d</strong> <em>e</em></p>"
    ),
    "****a****": "<p>****a****</p>",
    "**a *b***": "<p><strong>a <em>b</em></strong></p>",
    "2 * 3 * 4, snake_case_name, **open, \\*no\\*": "<p>2 * 3 * 4, snake_case_name, **open, *no*</p>",
    "`a*b*` ``c`d``": "<p><code>a*b*</code> <code>c`d</code></p>",
    "# A\n### *B*": "<h3>A</h3><h5><em>B</em></h5>",
    "- a\n- b\n  - c\n\n- d": "<ul><li><p>a</p></li><li><p>b</p><ul><li><p>c</p></li></ul></li><li><p>d</p></li></ul>",
    "3. a\n4. b": '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>',
    "> a\n> b": "<blockquote><p>a\nb</p></blockquote>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
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
    "| a | b |\n|---|": "<p>| a | b |\n|---|</p>",  # as many in the second line, or it is none
    "| a | b |": "<p>| a | b |</p>",
    "a\n---": "<p>a</p><hr>",
    "| a |\n| b |": "<p>| a |\n| b |</p>",
    "a | b\n--x|---": "<p>a | b\n--x|---</p>",
}


async def test_rendering(tab: Tab) -> None:
    engine = FakeEngine(held=True)
    async with talking_to(engine, tab):
        for text, expected in (RENDERED | TABLES).items():
            await answer(tab, engine, text)
            assert await tab.evaluate("document.querySelector('.turn:last-child .prose').innerHTML") == expected


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
        "- - " * 15_000 + "a",
        "|" * 60_000 + "\n" + "|-" * 60_000,
        "|a" * 5_000 + "|\n" + "|-" * 5_000 + "|\n" + "|\n" * 20_000,
        "a|b\n" * 15_000,
        "|" + " \t" * 30_000 + "\n|" + " \t" * 30_000 + "-x",
        "\\|" * 30_000 + "\n-|-",
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
        await tab.until("document.querySelector('.turn').ariaBusy === 'false'")
        await tab.evaluate("new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))")
        assert (await tab.evaluate("window.longest ?? 0")) < 3000  # milliseconds
