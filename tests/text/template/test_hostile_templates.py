"""A hostile template ends in a clear error, soon and without filling the memory."""

# ruff: noqa: E501  each template stands in one line

from __future__ import annotations

import threading
import time
import tracemalloc

import anyio
import pytest

from aengine.errors import CheckpointError, InvalidRequestError
from aengine.text.template import rendering
from aengine.text.template.control_tokens import ControlTokens
from aengine.text.template.rendering import ChatTemplates
from aengine.text.tokens.tokenizer import Tokenizer
from tests.one_in import one_in

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hello <b>"}]
SECONDS = 0.3
DOUBLINGS = "{% for i in range(99) %}"

ESCAPES = {
    "class": "{{ ''.__class__.__mro__ }}",
    "class by item": "{{ ''['__class__']['__mro__'] }}",
    "class by filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "class by map": "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': ''}) }}",
    "globals of a function": "{{ raise_exception.__globals__.sys }}",
    "code of a macro": "{% macro m() %}{% endmacro %}{{ m._func.__code__ }}",
    "frames": "{% set g = [1] | map('string') %}{{ g.gi_frame.f_globals }}",
    "through the namespace": "{% set n = namespace(__class__=1) %}",
    "setting a private name": "{% set n = namespace() %}{% set n._x = 1 %}",
    "changing the messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'x'}) }}",
    "subclasses": "{{ dict.__class__.__base__.__subclasses__() }}",
}

BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops without calls": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% for c in r %}x{% endfor %}{% endfor %}{% endfor %}",
    "loops in a macro": "{% macro m() %}{% for a in range(99999) %}{% for b in range(99999) %}xx{% endfor %}{% endfor %}{% endmacro %}{{ m() }}",
    "loops in a block": "{% set s %}{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endset %}",
    "a recursive loop": "{% for a in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "a wide recursive loop": "{% for a in range(9) recursive %}{% if loop.depth < 9 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "a filtered loop": "{% for a in range(99999) if a >= 0 %}{% for b in range(99999) if a > b %}{% endfor %}{% endfor %}",
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro fan-out": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "block recursion": "{% block a %}{{ self.a() }}{% endblock %}",
    "range": "{% for a in range(999999999) %}{% endfor %}",
    "repetition": "{{ 'x' * 9999999999 }}",
    "repetition reversed": "{{ 9999999999 * 'x' }}",
    "repetition of a list": "{{ [1] * 999999999 }}",
    "repetition step by step": "{{ 'x' * 99999 * 99999 * 99999 }}",
    "addition": "{% set n = namespace(s='x') %}" + DOUBLINGS + "{% set n.s = n.s + n.s %}{% endfor %}",
    "concatenation": "{% set n = namespace(s='x') %}" + DOUBLINGS + "{% set n.s = n.s ~ n.s ~ n.s %}{% endfor %}",
    "lists of lists": "{% set n = namespace(s=[1]) %}" + DOUBLINGS + "{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "lists of lists compared": "{% set n = namespace(s=[1], t=[1]) %}"
    + DOUBLINGS
    + "{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.s == n.t }}",
    "tuples as keys": "{% set n = namespace(s=(1,)) %}"
    + DOUBLINGS
    + "{% set n.s = (n.s, n.s) %}{% endfor %}{{ {n.s: 1} }}",
    "dicts of dicts": "{% set n = namespace(s={}) %}"
    + DOUBLINGS
    + "{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}{{ n.s | tojson }}",
    "views of dicts": "{% set n = namespace(s={}) %}"
    + DOUBLINGS
    + "{% set n.s = {1: n.s, 2: n.s}.items() %}{% endfor %}{{ n.s }}",
    "namespaces of namespaces": "{% set n = namespace(s=namespace()) %}"
    + DOUBLINGS
    + "{% set n.s = namespace(a=n.s, b=n.s) %}{% endfor %}{{ n.s }}{{ 'x' * 9999999999 }}",
    "power": "{{ 9 ** 99999 ** 99999 }}",
    "power step by step": "{% set n = namespace(s=9) %}" + DOUBLINGS + "{% set n.s = n.s * n.s %}{% endfor %}",
    "width": "{{ 'x' | center(9999999999) }}",
    "width of a method": "{{ 'x'.ljust(9999999999) }}",
    "width in a format": "{{ '{:9999999999}'.format(1) }}",
    "width in a percent format": "{{ '%9999999999d' % 1 }}",
    "width in a format filter": "{{ '%9999999999d' | format(1) }}",
    "width as an argument": "{{ '%*d' % (999999999, 1) }}",
    "width of a field": "{{ '{:{}}'.format(1, 999999999) }}",
    "width of a field as text": "{{ '{0:{1}}'.format(1, '>999999999') }}",
    "width of a field in a list": "{{ '{0:{1[0]}}'.format(1, ['>999999999']) }}",
    "width of a field by its name": "{{ '{a:{b}}'.format_map({'a': 1, 'b': '>999999999'}) }}",
    "many fields": "{{ ('{0}' * 30000).format('x' * 90000) }}",
    "indentation": "{{ ('\\n' * 99999) | indent(99999, true, true) }}",
    "json indentation": "{{ [[[range(9999) | list]]] | tojson(indent=99999) }}",
    "replacement": "{{ ('x' * 99999).replace('x', 'y' * 99999) }}",
    "replacement by a filter": "{{ ('x' * 99999) | replace('x', 'y' * 99999) }}",
    "replacement of nothing": "{{ ('x' * 99999).replace('', 'y' * 99999) }}",
    "join": "{{ ('y' * 99999).join(range(99999) | map('string') | list) }}",
    "join of an iterator": "{{ ('y' * 99999).join(range(99999) | map('string')) }}",
    "join by a filter": "{{ range(99999) | join('y' * 99999) }}",
    "join by a filter's keyword": "{{ range(99999) | map('string') | join(d='y' * 99999) }}",
    "tabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "translation": "{{ ('x' * 99999).translate({120: 'y' * 99999}) }}",
    "sum of lists": "{{ ([range(999) | list] * 999) | sum(start=[]) }}",
    "backward search": "{{ ('a' * 99999 * 20).rfind('b' + 'a' * 90000) }}",
    "strip": "{{ ('a' * 99999 * 20).strip('b' * 90000 + 'a') }}",
    "rounding": "{{ 1 | round(999999999) }}",
    "bytes": "{{ (5).to_bytes(9999999999, 'big') }}",
    "output": "{% set s = 'x' * 99999 %}{% for a in range(99999) %}{{ s }}{% endfor %}",
    "literal output": "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "slices": "{% set s = 'x' * 99999 * 10 %}{% set n = namespace(l=[]) %}{% for a in range(9999) %}{% set n.l = n.l + [s[1:]] %}{% endfor %}",
    "tests": "{% for a in range(99999) %}{{ range(99999) | select('odd') | list | length }}{% endfor %}",
}

OTHERS = {
    "include": "{% include 'etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'base' %}",
    "a namespace that holds itself": "{% set n = namespace() %}{% set n.a = [n] %}{{ n.a }}{{ raise_exception('done') }}",
}


def templates(source: str) -> ChatTemplates:
    return ChatTemplates("the folder", {"default": source}, {}, ControlTokens(["<|im_end|>"]))


@pytest.mark.parametrize("name", list(ESCAPES))
def test_no_way_to_pythons_internals(name: str) -> None:
    with pytest.raises((CheckpointError, InvalidRequestError)):
        templates(ESCAPES[name]).render(MESSAGES)
    assert MESSAGES == [{"role": "user", "content": "hello <b>"}]


def test_an_escape_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match=r"the folder: its chat template does something forbidden.*__class__"):
        templates(ESCAPES["class"]).render(MESSAGES)


@pytest.mark.parametrize("name", one_in(3, BOMBS))
def test_bombs_are_refused_soon_and_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_SECONDS", SECONDS)
    bomb = templates(BOMBS[name])
    tracemalloc.start()
    start = time.thread_time()
    try:
        # A bound refuses it, not a failed allocation.
        with pytest.raises(InvalidRequestError, match=r"it (takes|makes|passes|computes|nests)"):
            bomb.render(MESSAGES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.thread_time() - start < SECONDS + 2.5  # tracing slows everything several times
    assert peak < 300 * 2**20


@pytest.mark.parametrize("name", ["output", "literal output", "loops in a block"])
def test_much_text_is_refused_however_fast_it_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_SECONDS", 60.0)
    with pytest.raises(InvalidRequestError, match="makes too much text"):
        templates(BOMBS[name]).render(MESSAGES)


@pytest.mark.parametrize("name", list(OTHERS))
def test_everything_else_is_an_error_of_ours(name: str) -> None:
    with pytest.raises((CheckpointError, InvalidRequestError)):
        templates(OTHERS[name]).render(MESSAGES)


async def test_a_slow_template_holds_neither_the_loop_nor_its_caller(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled caller continues at once; the thread ends by itself."""
    monkeypatch.setattr(rendering, "RENDER_SECONDS", 1.0)
    monkeypatch.setattr(byte_level, "_templates", templates(BOMBS["nested loops"]))
    before, seconds = threading.active_count(), 9.9
    while seconds > 0.8 and threading.active_count() <= before + 3:  # the machine may be busy
        start = time.monotonic()
        with anyio.move_on_after(0.2) as scope:
            await byte_level.encode_chat(MESSAGES)
        assert scope.cancelled_caught
        seconds = time.monotonic() - start
    assert seconds < 0.8
    with pytest.raises(InvalidRequestError, match="longer than 1 seconds"):
        await byte_level.encode_chat(MESSAGES)


def test_renderings_in_several_threads_do_not_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = templates("{% for a in range(20000) %}{{ messages[0].content }}{% endfor %}")
    expected = "ab" * 20000
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(shared.render([{"role": "user", "content": "ab"}])[0]))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_long_messages_are_within_bounds() -> None:
    """The bounds grow with the size of the request."""
    text = "line of text with <tags>\n" * 80_000  # 2 MB
    shared = templates(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content.strip().replace('<tags>', '<b>') }}"
        "{{ m.content.split('</think>')[-1] ~ '<|im_end|>' }}{{ m | tojson }}{% endfor %}"
    )
    rendered, _ = shared.render([{"role": "user", "content": text}])
    assert len(rendered) > 3 * 1_900_000
