"""A jinja2 sandbox for chat templates, with bounds on time and memory.

jinja2's own sandbox keeps a template away from Python's internals. Here, in addition, every loop, call, filter, literal
and output draws on the rendering's `Budget`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import Context, LoopContext, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from aengine.text.template.budget import Budget, LimitError
from aengine.text.template.control_tokens import Marker


class RaisedByTemplate(TemplateError):
    """The template called `raise_exception`."""


class TemplateNamespace(Namespace):
    """`namespace()` that refuses names with a leading underscore, and is printed without its content."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that `namespace(self=...)` works
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # namespaces may hold each other many times


class TemplateDict:
    """`dict()` without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


def raise_exception(message: object) -> None:
    """Refuse the messages with the template's own text."""
    raise RaisedByTemplate(str(message))


def strftime_now(format: str) -> str:  # noqa: A002  the name that templates may use
    """Return the current time of this machine."""
    return datetime.now().strftime(format)


# The guards that `_Instrument` puts into the tree. They are filters: a template's variables cannot shadow a filter's
# name.
_LOOP, _CONCAT, _LITERAL, _COMPARE = "guarded loop", "guarded concat", "guarded literal", "guarded compare"

# These make HTML or random text. Their time cannot be bounded, and no chat template needs them.
_REMOVED_FILTERS = ("pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_REMOVED_GLOBALS = ("lipsum",)

# Methods and filters that search their value for their arguments.
_SEARCHES = frozenset(
    {
        "split",
        "rsplit",
        "partition",
        "rpartition",
        "startswith",
        "endswith",
        "find",
        "rfind",
        "index",
        "rindex",
        "count",
        "strip",
        "lstrip",
        "rstrip",
        "trim",
        "removeprefix",
        "removesuffix",
    }
)

_SCOPES = ("_loop_vars", "_block_vars")  # jinja2 adds these to a call's keywords

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda left, right: left == right,
    "ne": lambda left, right: left != right,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates. They render only inside `rendering`. Threads do not disturb each other.

    A text that a template searches for (`in`, `==`, `split`, `replace`, ...) is marked like the text that is searched.
    So the template sees marked messages as if they were unmarked.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            finalize=self._finalize,
        )
        self._current = threading.local()
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name in _REMOVED_GLOBALS:
            del self.globals[name]
        for table in (self.filters, self.tests):
            for name, function in list(table.items()):
                table[name] = self._guarded(name, function)
        self.filters[_LOOP] = self._loop
        self.filters[_CONCAT] = self._concat
        self.filters[_LITERAL] = self._literal
        self.filters[_COMPARE] = self._compare

    @contextmanager
    def rendering(self, budget: Budget, marker: Marker | None) -> Iterator[None]:
        """In this context, renderings of this thread draw on `budget`, and their messages are marked with `marker`."""
        self._current.budget, self._current.marker = budget, marker
        try:
            yield
        finally:
            self._current.budget = self._current.marker = None

    @property
    def budget(self) -> Budget:
        """The rendering's budget. Raises `LimitError` while a template is compiled, so that nothing is computed."""
        budget: Budget | None = getattr(self._current, "budget", None)
        if budget is None:
            raise LimitError("nothing is being rendered")
        return budget

    @property
    def marker(self) -> Marker | None:
        """The marker of the rendering's messages; None if they are not marked."""
        marker: Marker | None = getattr(self._current, "marker", None)
        return marker

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter, guarded like all others."""
        self.filters[name] = self._guarded(name, function)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Guard a call. Every call in a template passes here."""
        self, budget = __self, __self.budget
        # jinja2 wraps `str.format`.
        receiver = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        name = getattr(__obj, "__name__", "") if isinstance(receiver, (str, bytes)) else ""
        if name == "join":
            args = tuple(map(_settled, args))
        args = self._marked_searches(name, receiver, args)
        named = [value for key, value in kwargs.items() if key not in _SCOPES]
        budget.check_call(name, receiver, (*args, *named))
        if isinstance(__obj, LoopContext) and args:
            args = (_Loop(budget, args[0], 1), *args[1:])
        result = super().call(__context, __obj, *args, **kwargs)
        budget.take(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Guard `+`, `*`, `**` and `%`, which all pass here."""
        budget = self.budget
        if operator == "*":
            budget.check_product(left, right)
        elif operator == "**":
            budget.check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            budget.check_call("%", left, right if isinstance(right, tuple) else (right,))
        result = super().call_binop(context, operator, left, right)
        budget.take(result)
        return result

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Instrument().visit(tree)
        tree.set_environment(self)
        return tree

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter or test, so that it draws on the budget."""
        at = 1 if hasattr(function, "jinja_pass_arg") else 0  # the context or environment may come before the value

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            value, rest = (args[at], args[at + 1 :]) if len(args) > at else (None, ())
            if name in ("join", "sum"):
                value = _settled(value)
            rest = self._marked_searches(name, value, rest)
            budget.check_call("%" if name == "format" else name, value, (*rest, *kwargs.values()))
            result = function(*args[:at], value, *rest, **kwargs)
            budget.take(result)
            return result

        return guarded

    def _marked_searches(self, name: str, text: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
        marker = self.marker
        if marker is None or not isinstance(text, str) or marker.mark not in text:
            return args
        if name == "replace":
            return (*map(marker.mark_text, args[:1]), *args[1:])
        return tuple(map(marker.mark_text, args)) if name in _SEARCHES else args

    def _finalize(self, value: Any) -> Any:
        budget: Budget | None = getattr(self._current, "budget", None)
        if budget is not None:  # the compiler evaluates constants without a budget
            budget.take(value)
        return value

    def _loop(self, items: Any, weight: int) -> _Loop:
        return _Loop(self.budget, items, weight)

    @pass_eval_context
    def _concat(self, eval_context: nodes.EvalContext, parts: tuple[Any, ...]) -> str:
        budget = self.budget
        budget.allow(sum(map(budget.measure, parts)))
        joined = markup_join(parts) if eval_context.autoescape else str_join(parts)
        budget.take(joined)
        return joined

    def _literal(self, value: Any) -> Any:
        self.budget.take(value)
        return value

    def _compare(self, left: Any, right: Any, comparison: str) -> bool:
        self.budget.spend(1)
        if self.marker is not None:
            left, right = self.marker.alike(left, right)
        return _COMPARISONS[comparison](left, right)


class _Loop:
    """The items of a for loop. Each one is paid for before it is yielded."""

    def __init__(self, budget: Budget, items: Iterable[object], weight: int) -> None:
        self._budget = budget
        self._items = items
        self._weight = weight

    def __iter__(self) -> Iterator[object]:
        spend, weight = self._budget.spend, self._weight
        for item in self._items:
            spend(weight)
            yield item

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]  # `loop.length` expects the TypeError


class _Instrument(NodeTransformer):
    """Puts guards around a template's loops, literals, concatenations and comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = 1 + sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _filter(_LOOP, node.iter, nodes.Const(weight))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_CONCAT, nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_LITERAL, node) if node.ctx == "load" else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_LITERAL, node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_LITERAL, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) != 1 or node.ops[0].op not in _COMPARISONS:
            return node
        return _filter(_COMPARE, node.expr, node.ops[0].expr, nodes.Const(node.ops[0].op))


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}`, which shows training code what the assistant said."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _filter(name: str, value: nodes.Node, *arguments: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None, lineno=value.lineno)


def _settled(value: Any) -> Any:
    """Make a list of a value that cannot be measured, such as an iterator or a range."""
    measurable = isinstance(value, (str, bytes, list, tuple, dict)) or not isinstance(value, Iterable)
    return value if measurable else list(value)
