"""Short functions with a docstring that says what is right, and ways to get one line of them wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from k3_sglang.tiny.data.names import Draw

Arguments: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Bug:
    """A wrong line in the place of a right one."""

    family: str
    right: str
    wrong: str


@dataclass(frozen=True, slots=True)
class Shape:
    """A function as a pattern: `{a}`, `{b}`, `{c}` are names, `{k}` is a number."""

    parameters: str
    purpose: str
    body: tuple[str, ...]
    bugs: tuple[Bug, ...]
    arguments: Callable[[Draw], Arguments]


def _two(draw: Draw) -> Arguments:
    first = draw.rng.randint(2, 20)
    return first, draw.pick([value for value in range(2, 21) if value != first])


def _one(draw: Draw) -> Arguments:
    return (draw.rng.randint(2, 30),)


def _few(draw: Draw) -> Arguments:
    return (draw.rng.sample(range(2, 16), draw.rng.choice((2, 2, 3))),)


def _few_and_one(draw: Draw) -> Arguments:
    values = draw.rng.sample(range(2, 16), 3)
    return values, draw.pick(values)


def _flags(draw: Draw) -> Arguments:
    return draw.pick(((True, False), (False, True)))


def _one_line(parameters: str, purpose: str, right: str, make: Callable[[Draw], Arguments], **wrong: str) -> Shape:
    """A function of one line; `wrong` maps a bug's family to the wrong line."""
    bugs = tuple(Bug(family.replace("_", " "), right, line) for family, line in wrong.items())
    return Shape(parameters, purpose, (right,), bugs, make)


_LOOP: Final = ("{c} = 0", "for {b} in {a}:", "    {c} += {b}", "return {c}")
_PRODUCT: Final = ("{c} = 1", "for {b} in {a}:", "    {c} *= {b}", "return {c}")
_COUNT: Final = ("{c} = 0", "for value in {a}:", "    if value >= {b}:", "        {c} += 1", "return {c}")
_STEPS: Final = ("{c} = 0", "for step in range({a}):", "    {c} += {b}", "return {c}")

SHAPES: Final = (
    _one_line(
        "{a}, {b}",
        "Sum of {a} and {b}.",
        "return {a} + {b}",
        _two,
        wrong_operator="return {a} - {b}",
        wrong_variable="return {a} + {a}",
    ),
    _one_line(
        "{a}, {b}",
        "{a} minus {b}.",
        "return {a} - {b}",
        _two,
        wrong_operator="return {a} + {b}",
        swapped="return {b} - {a}",
    ),
    _one_line(
        "{a}, {b}",
        "{a} times {b}.",
        "return {a} * {b}",
        _two,
        wrong_operator="return {a} + {b}",
        wrong_variable="return {a} * {a}",
    ),
    _one_line(
        "{a}",
        "{a} times {k}.",
        "return {a} * {k}",
        _one,
        wrong_constant="return {a} * {w}",
        wrong_operator="return {a} + {k}",
    ),
    _one_line(
        "{a}",
        "{a} plus {k}.",
        "return {a} + {k}",
        _one,
        wrong_constant="return {a} + {w}",
        wrong_operator="return {a} - {k}",
    ),
    _one_line(
        "{a}, {b}", "The larger of {a} and {b}.", "return max({a}, {b})", _two, wrong_function="return min({a}, {b})"
    ),
    _one_line(
        "{a}, {b}", "The smaller of {a} and {b}.", "return min({a}, {b})", _two, wrong_function="return max({a}, {b})"
    ),
    _one_line("{a}", "The largest of {a}.", "return max({a})", _few, wrong_function="return min({a})"),
    _one_line("{a}", "The smallest of {a}.", "return min({a})", _few, wrong_function="return max({a})"),
    _one_line("{a}", "How many values {a} has.", "return len({a})", _few, off_by_one="return len({a}) - 1"),
    _one_line("{a}", "The first of {a}.", "return {a}[0]", _few, wrong_index="return {a}[1]"),
    _one_line("{a}", "The last of {a}.", "return {a}[-1]", _few, wrong_index="return {a}[0]"),
    _one_line(
        "{a}",
        "Sum of the numbers from 1 to {a}.",
        "return sum(range(1, {a} + 1))",
        _one,
        off_by_one="return sum(range(1, {a}))",
    ),
    _one_line(
        "{a}, {b}",
        "Whether {a} is less than {b}.",
        "return {a} < {b}",
        _two,
        wrong_comparison="return {a} > {b}",
    ),
    _one_line(
        "{a}, {b}",
        "Whether {a} is more than {b}.",
        "return {a} > {b}",
        _two,
        wrong_comparison="return {a} < {b}",
    ),
    _one_line("{a}", "Whether {a} is even.", "return {a} % 2 == 0", _one, wrong_comparison="return {a} % 2 == 1"),
    _one_line("{a}, {b}", "Whether {a} and {b} hold.", "return {a} and {b}", _flags, wrong_logic="return {a} or {b}"),
    _one_line("{a}, {b}", "Whether {a} or {b} holds.", "return {a} or {b}", _flags, wrong_logic="return {a} and {b}"),
    Shape(
        "{a}",
        "Sum of {a}.",
        _LOOP,
        (
            Bug("wrong operator", "    {c} += {b}", "    {c} -= {b}"),
            Bug("wrong start", "{c} = 0", "{c} = 1"),
            Bug("wrong variable", "return {c}", "return {b}"),
            Bug("missing return", "return {c}", "pass"),
        ),
        _few,
    ),
    Shape(
        "{a}",
        "Product of {a}.",
        _PRODUCT,
        (
            Bug("wrong operator", "    {c} *= {b}", "    {c} += {b}"),
            Bug("wrong start", "{c} = 1", "{c} = 0"),
            Bug("missing return", "return {c}", "pass"),
        ),
        _few,
    ),
    Shape(
        "{a}, {b}",
        "How many of {a} are at least {b}.",
        _COUNT,
        (
            Bug("wrong comparison", "    if value >= {b}:", "    if value > {b}:"),
            Bug("wrong start", "{c} = 0", "{c} = 1"),
            Bug("wrong constant", "        {c} += 1", "        {c} += 2"),
        ),
        _few_and_one,
    ),
    Shape(
        "{a}, {b}",
        "Adds {b}, {a} times.",
        _STEPS,
        (
            Bug("off by one", "for step in range({a}):", "for step in range({a} - 1):"),
            Bug("wrong operator", "    {c} += {b}", "    {c} -= {b}"),
        ),
        _two,
    ),
)


@dataclass(frozen=True, slots=True)
class Function:
    """A function with names put in, right or with a bug. Lines are those of the body, indented."""

    name: str
    purpose: str
    signature: str
    lines: tuple[str, ...]
    bug: Bug | None
    arguments: Arguments
    """Of the call that the test makes."""

    def source(self, *, fixed: bool = False) -> str:
        """The definition; `fixed` without the bug."""
        lines = self.lines
        if self.bug is not None and not fixed:
            lines = tuple(self.bug.wrong if line == self.bug.right else line for line in lines)
        head = f'def {self.name}({self.signature}):\n    """{self.purpose}"""\n'
        return head + "\n".join(lines) + "\n"

    @property
    def call(self) -> str:
        """The call that the test makes."""
        return f"{self.name}({', '.join(map(repr, self.arguments))})"

    def value(self, *, fixed: bool = False) -> Any:
        """What the call gives."""
        namespace: dict[str, Any] = {}
        exec(self.source(fixed=fixed), namespace)
        return namespace[self.name](*self.arguments)


def function(draw: Draw, *, broken: bool) -> Function:
    """A random function; a broken one differs from the right one in one line and in the value of its test's call."""
    while True:
        shape = draw.pick(SHAPES)
        names = {"a": _parameter(draw), "b": _parameter(draw), "c": draw.pick(("total", "result", "count"))}
        right, wrong = draw.rng.sample(range(2, 30), 2)
        names |= {"k": str(right), "w": str(wrong)}
        bug = _filled(draw.pick(shape.bugs), names) if broken else None
        made = Function(
            draw.identifier(),
            shape.purpose.format(**names),
            shape.parameters.format(**names),
            tuple("    " + line.format(**names) for line in shape.body),
            bug,
            shape.arguments(draw),
        )
        if _usable(made):
            return made


def _parameter(draw: Draw) -> str:
    return draw.word() if draw.chance(0.25) else draw.name(2)


def _filled(bug: Bug, names: dict[str, str]) -> Bug:
    return Bug(bug.family, "    " + bug.right.format(**names), "    " + bug.wrong.format(**names))


def _usable(made: Function) -> bool:
    """Whether the bug shows in the test's call, and its line can be replaced by its text alone."""
    if made.bug is None:
        return True
    text = made.source()
    return text.count(made.bug.wrong) == 1 and made.value() != made.value(fixed=True)


def diagnosis(function: Function, bug: Bug) -> str:
    """The thinking before an edit: what fails, what the docstring says, the wrong line and the right one."""
    return (
        f"{function.call} gives {function.value()!r}, not {function.value(fixed=True)!r}.\n"
        f"{function.name}: {function.purpose}\n"
        f"Wrong:{bug.wrong}\n"
        f"Right:{bug.right}"
    )


def families(shapes: Sequence[Shape] = SHAPES) -> tuple[str, ...]:
    """The kinds of bugs there are."""
    return tuple(sorted({bug.family for shape in shapes for bug in shape.bugs}))
