"""Render a chat template: Jinja that comes with a model, from strangers, so in a sandbox and within limits.

Jinja's sandbox keeps a template from the machine, but not from looping for hours or making gigabytes. So whatever can
take long or grow (loops, calls, filters, output, sums of texts) is weighed first, and a rendering has a budget.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from minigpt.errors import ModelFolderError

MAX_CHARACTERS = 200_000  # of a template; the longest in use have a tenth of that
BUDGET = 10_000_000  # units of work a rendering: one is about a character
STEP = 30  # units that anything costs which is weighed at all
ITEM = 20  # units of an item in a list, and of a pass through a loop

_CHEAP_FILTERS = {"length", "count", "first", "last", "default", "d"}
_COSTLY_TESTS = ("in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "le", "<=", "gt", ">", "ge", ">=")


class Template:
    """A compiled chat template. Every error of it, here and in ``render``, is a ModelFolderError of one line."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_CHARACTERS:
            raise ModelFolderError(f"chat template: {len(source):,} characters, more than {MAX_CHARACTERS:,}")
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:
            raise _as_model_error(error) from error

    def render(self, messages: Sequence[Mapping[str, str]], names: Mapping[str, str], generation_prompt: bool) -> str:
        """Return the text of a conversation; ``names`` are those of the special tokens."""
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": generation_prompt}
        self._environment.left = BUDGET
        try:
            return self._template.render(**names, **variables)
        except Exception as error:
            raise _as_model_error(error) from error


class TemplateRefusal(ModelFolderError):
    """The template itself will not have such messages, and says why."""


class _Refused(TemplateError):
    """What ``raise_exception`` in a template raises."""


class _TooMuch(TemplateError):
    """The budget is used up."""


def _as_model_error(error: Exception) -> ModelFolderError:
    reason = " ".join((str(error) or type(error).__name__).split())[:300].rstrip(".")
    if isinstance(error, _Refused):
        return TemplateRefusal(f"chat template: it does not take these messages ({reason})")
    if isinstance(error, RecursionError):
        reason = "nested too deeply"
    where = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
    return ModelFolderError(f"chat template{where}: {reason}; use another with --template chatml")


class _Generation(Extension):
    """``{% generation %}`` marks answers for training in transformers; here it is only read over."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox as transformers sets it up, and a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.left = BUDGET
        filters: dict[str, Any] = self.filters
        tests: dict[str, Any] = self.tests
        for name in set(filters) - _CHEAP_FILTERS:
            filters[name] = self._weighing(filters[name])
        for name in _COSTLY_TESTS:
            tests[name] = self._weighing(tests[name])
        self.filters |= {"tojson": self._weighing(_to_json), "weighed": _weighed, "counted": _counted}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now, "namespace": _Namespace}

    def spend(self, units: int) -> None:
        self.left -= STEP + units
        if self.left < 0:
            raise _TooMuch("it takes too long, or writes too much")

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        target = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if __obj is _now or getattr(__obj, "__name__", "") in ("format", "format_map"):
            _check_widths(target, *args)
        named = [
            value for name, value in kwargs.items() if name not in ("_block_vars", "_loop_vars")
        ]  # those are Jinja's
        __self._spend_on([target if isinstance(target, str | list | tuple | dict) else None, *args, *named])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        units = _weight(left) + _weight(right)
        numbers = [abs(value) for value in (left, right) if isinstance(value, int)]
        if operator == "*" and len(numbers) == 1:
            units *= numbers[0]
        elif operator == "**" and isinstance(right, int):
            units *= abs(right)
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
            units += _widths(right if isinstance(right, tuple) else (right,))
        self.spend(units)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Weighing().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def _spend_on(self, values: Sequence[Any]) -> None:
        """Pay for a call: what comes out may be as large as the first argument times the largest other one."""
        weights = [_weight(value) for value in values] or [0]
        self.spend(weights[0] * (1 + max(weights[1:], default=0)) + max(weights[1:], default=0) + _widths(values))

    def _weighing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def weighing(*args: Any, **kwargs: Any) -> Any:
            args = tuple(self._settled(value) for value in args)
            if function.__name__ == "do_format":
                _check_widths(*args)
            own = [*args, *kwargs.values()]
            self._spend_on([value for value in own if not isinstance(value, Context | _Environment)])
            return function(*args, **kwargs)

        return weighing

    def _settled(self, value: Any) -> Any:
        """Return a list in place of what is made only while it is looped over, so that it can be weighed."""
        if not isinstance(value, Iterator) or isinstance(value, LoopContext):
            return value
        items = []
        for item in value:
            self.spend(0)
            items.append(item)
        return items


class _Weighing(NodeTransformer):
    """Put the weighing into a parsed template."""

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [_filtered(child, "weighed") for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [_filtered(child, "weighed") for child in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "weighed")
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, "weighed")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "weighed")
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        size = 0 if node.test is None else _size([node.test])
        self._charge_body(node)
        node.iter = _filtered(node.iter, "counted", size)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self._charge_body(node)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:
        self._charge_body(node)
        return node

    def _charge_body(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> None:
        """Let each pass through a body cost as much as there is in it."""
        size = _size(node.body)
        self.generic_visit(node)
        charge = _filtered(nodes.Const("", lineno=node.lineno), "weighed", size)
        node.body = [nodes.Output([charge], lineno=node.lineno), *node.body]


def _filtered(node: nodes.Node, name: str, *arguments: int) -> nodes.Filter:
    constants = [nodes.Const(value, lineno=node.lineno) for value in arguments]
    return nodes.Filter(node, name, constants, [], None, None, lineno=node.lineno)


def _size(bodies: Sequence[nodes.Node]) -> int:
    return len(bodies) + sum(1 for body in bodies for _ in body.find_all(nodes.Node))


@pass_context  # never worked out while compiling
def _weighed(context: Context, value: Any, more: int = 0) -> Any:
    environment: Any = context.environment
    value = environment._settled(value)
    environment.spend(_weight(value) + more)
    return value


@pass_context
def _counted(context: Context, value: Any, test: int) -> Any:
    environment: Any = context.environment
    value = environment._settled(value)
    environment.spend((ITEM + test) * (len(value) if hasattr(value, "__len__") else 1))
    return value


def _weight(value: Any) -> int:
    """Return about how many characters a value has when written out; counting ends at the budget."""
    total, waiting = 0, [value]
    while waiting and total <= BUDGET:
        item = waiting.pop()
        if isinstance(item, str | bytes | range):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
        elif isinstance(item, Mapping):
            total += ITEM * len(item)
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            total += ITEM * len(item)
            waiting += item
        total += 1
    return total


def _widths(values: Sequence[Any]) -> int:
    """Return the sum of numbers that may say how wide or how many."""
    return sum(abs(value) for value in values if isinstance(value, int))


def _check_widths(*formats: Any) -> None:
    if any(isinstance(text, str) and re.search(r"\d{5}", text) for text in formats):
        raise _TooMuch("it asks for too wide a text")


def _refuse(message: str) -> None:
    raise _Refused(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes what is special in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Namespace(Namespace):
    """A namespace without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # ``self`` may be a name in it
        for name in dict(*args[1:], **kwargs):
            _Namespace._check(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace holds no name such as {name!r}")
