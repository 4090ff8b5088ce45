"""Chat templates that are watched: whether they only copy and trim the texts of messages, or look at them.

Called by `outlines`. A watched text goes through a template as itself or joined to other text; what would make a plain text of it, on which
nobody could see what becomes of it, raises Looked, and so does all that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final

from jinja2 import Template, nodes
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

TRIMMED: Final = "\ue001"  # behind a text that was trimmed
_PASSING: Final = frozenset((  # filters that give a text on as it is, or look at it by means that it notices
    "attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr",
    "string", "trim",
))  # fmt: skip
_ASKING: Final = frozenset((  # tests that ask for the kind of a value alone, or compare it
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer", "float", "boolean", "true", "false", "callable",
    "eq", "equalto", "==", "ne", "!=", "sameas",
))  # fmt: skip
_PLAIN: Final = (str, int, float, bool, type(None))
_INSIDE: Final = "_inside"
_COLLECTING: Final = (nodes.Macro, nodes.CallBlock, nodes.AssignBlock, nodes.FilterBlock)  # what they put out becomes a plain text


class Looked(Exception):
    """The template looks at a text."""


class WatchedText(str):
    """A text that a template may copy, join, trim and test for being empty, and nothing else without raising Looked."""

    __slots__ = ()

    def _looked(self, *args: object, **kwargs: object) -> Any:
        raise Looked

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __getitem__ = __iter__ = __len__ = __hash__ = _looked
    __mod__ = __rmod__ = __mul__ = __rmul__ = __format__ = __repr__ = __reduce_ex__ = _looked

    def __bool__(self) -> bool:
        return True

    def __add__(self, other: object, /) -> str:
        return _Joined(f"{str.__str__(self)}{_letters(other)}")

    def __radd__(self, other: object, /) -> str:
        return _Joined(f"{_letters(other)}{str.__str__(self)}")

    def __getattribute__(self, name: str) -> Any:
        if name in ("strip", "_looked", "__class__"):
            return super().__getattribute__(name)
        if name == "__html__":
            raise AttributeError(name)
        raise Looked

    def strip(self, chars: str | None = None, /) -> str:
        """Args: chars: others than blanks are looking."""
        return _Trimmed(f"{str.__str__(self)}{TRIMMED}") if chars is None else self._looked()


class _Trimmed(WatchedText):
    __slots__ = ()

    def strip(self, chars: str | None = None, /) -> str:
        return self if chars is None else self._looked()


class _Joined(WatchedText):
    __slots__ = ()

    def strip(self, chars: str | None = None, /) -> str:
        return str(self._looked())


def _letters(value: object) -> str:
    return str.__str__(value) if isinstance(value, str) else str(value)


class WatchingEnvironment(ImmutableSandboxedEnvironment):
    """Filters, tests and calls that are given a watched text raise Looked, but for the few that are known to be harmless."""

    def watch(self) -> None:
        """To be called when all filters and tests are there."""
        filters: Mapping[str, Any] = self.filters
        tests: Mapping[str, Any] = self.tests
        self.filters = {name: f if name in _PASSING else _guarded(f) for name, f in filters.items()} | {_INSIDE: _inside}
        self.tests = {name: f if name in _ASKING else _guarded(f) for name, f in tests.items()}

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # as in jinja2: a template's names do not clash
        if __obj is not Namespace:
            _check((args, kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def compile_watching(self, source: str) -> Template:
        """A template in which texts are never joined or compared behind their back. Raises Looked for what cannot be watched."""
        tree = self.parse(source)
        if next(tree.find_all(_COLLECTING), None) is not None:
            raise Looked
        _Watching().visit(tree)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))


class _Watching(NodeTransformer):
    """`a ~ b` becomes `a + b`, and `a in b` a filter that can be guarded."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        out: nodes.Expr = nodes.Const("", lineno=node.lineno)
        for part in node.nodes:
            out = nodes.Add(out, part, lineno=node.lineno)
        return out

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(operand.op in ("in", "notin") for operand in node.ops):
            return node
        if len(node.ops) > 1:
            raise Looked
        inside = nodes.Filter(node.expr, _INSIDE, [node.ops[0].expr], [], None, None, lineno=node.lineno)
        return inside if node.ops[0].op == "in" else nodes.Not(inside, lineno=node.lineno)


def _inside(value: Any, whole: Any) -> bool:
    if isinstance(value, WatchedText) and isinstance(whole, str):
        raise Looked
    return value in whole


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _check((args, kwargs))
        return function(*args, **kwargs)

    return wraps(function)(guarded)  # with the mark of those that want the context


def _check(value: Any) -> None:
    """Raises Looked when a watched text is in there, or may be."""
    if isinstance(value, WatchedText):
        raise Looked
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check(key)
            _check(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check(item)
    elif not isinstance(value, (*_PLAIN, Undefined, Context, WatchingEnvironment)):
        raise Looked
