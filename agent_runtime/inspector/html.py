"""Markup whose text cannot be forgotten to be escaped: a string is text, and only what `element` made is markup.

The light install has no template library, and a dependency for five pages would be one more thing to keep. With
functions the escaping is in one place, and the type checker reads the pages.
"""

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

_VOID = frozenset(("meta", "link", "br", "input"))

_INVISIBLE: dict[int, str] = {
    **{code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)},
    0x7F: "\u2421",
    # Characters that turn the direction of text around could make one name look like another.
    **{code: f"[U+{code:04X}]" for code in (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))},
}


class Html(str):
    """Finished markup."""

    __slots__ = ()


Child: TypeAlias = "str | int | None | Iterable[Child]"
"""Text (escaped), a number, markup, nothing, or several of them."""
Attribute: TypeAlias = str | int | float | bool | None


def element(name: str, /, *children: Child, **attributes: Attribute) -> Html:
    """An element. ``class_`` is the attribute ``class``, ``data_at`` is ``data-at``; None and False leave one out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: Child) -> Html:
    """Several pieces, one after the other."""
    return Html("".join(map(_markup, children)))


def visible(text: str) -> str:
    """Text with characters that could not be seen, or would turn others around, in a visible form."""
    return text.translate(_INVISIBLE)


def page_bytes(markup: Html) -> bytes:
    """For the wire; halves of surrogate pairs are spelled out."""
    return markup.encode("utf-8", "backslashreplace")


def _markup(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return escape(visible(child))
    if isinstance(child, int):
        return str(child)
    return "".join(map(_markup, child))


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    written = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f' {name}="{escape(visible(written))}"'
