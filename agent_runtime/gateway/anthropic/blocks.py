"""Content blocks of a messages request to the parts of chat messages."""

from typing import Any, NoReturn

from k3_sglang.chat.cache_marks import MARK
from k3_sglang.chat.json_types import is_list, is_object
from k3_sglang.chat.request_fields import refuse, refuse_unknown, required_object, shown, wrong_type

Json = dict[str, Any]

OWN_SIGNATURE = "k3."
"""How signatures that were made here begin; those of other models say nothing here."""

_TEXT_KEYS = frozenset(("type", "text", "citations", MARK))
_IMAGE_KEYS = frozenset(("type", "source", MARK))
_REFUSED = {
    "document": "K3 reads text and images; send the document's text, or its pages as images",
    "search_result": "K3 knows no search results as such; send them as text",
    "container_upload": "there are no containers here",
    "compaction": "histories are not compacted here; do it in the client",
    "mid_conv_system": "send a message with the role system",
}


def blocks_of(value: Any, param: str) -> list[Json]:
    """A content as a list of blocks; text stands for one block."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not is_list(value):
        wrong_type(param, value, "a string or a list of content blocks")
    return [required_object(block, f"{param}.{position}") for position, block in enumerate(value)]


def part_of(block: Json, param: str) -> Json:
    """A text or an image as a part of a chat message."""
    kind = block.get("type")
    if kind == "text":
        refuse_unknown(block, _TEXT_KEYS, param, "a text block")
        if block.get("citations"):
            refuse(f"{param}.citations", "unsupported_field", "K3 knows no citations; remove them")
        return marked({"type": "text", "text": text_of(block, param)}, block)
    if kind == "image":
        refuse_unknown(block, _IMAGE_KEYS, param, "an image block")
        source = _image_source(required_object(block.get("source"), f"{param}.source"), f"{param}.source")
        return marked({"type": "image_url", "image_url": {"url": source}}, block)
    refuse_block(kind, param, "text and image")


def text_of(block: Json, param: str, key: str = "text") -> str:
    """A block's text."""
    text = block.get(key)
    if not isinstance(text, str):
        wrong_type(f"{param}.{key}", text, "a string")
    return text


def marked(chat: Json, block: Json) -> Json:
    """The same with the block's cache mark."""
    mark = block.get(MARK)
    return chat if mark is None else {**chat, MARK: mark}


def refuse_block(kind: Any, param: str, allowed: str) -> NoReturn:
    """Refuse a block by its type, with the reason if it is a known one."""
    reason = _REFUSED.get(kind) if isinstance(kind, str) else None
    if reason is None and isinstance(kind, str) and kind.startswith(("server_tool", "mcp_", "web_")):
        reason = "no tools are run here"
    more = f" ({reason})" if reason else ""
    refuse(f"{param}.type", "unsupported_block", f"got {shown(kind)}{more}; allowed here: {allowed}")


def _image_source(source: Json, param: str) -> str:
    kind = source.get("type")
    if kind == "base64":
        refuse_unknown(source, frozenset(("type", "media_type", "data")), param, "a base64 source")
        media_type, data = text_of(source, param, "media_type"), text_of(source, param, "data")
        return f"data:{media_type};base64,{data}"
    if kind == "url":
        refuse_unknown(source, frozenset(("type", "url")), param, "a URL source")
        return text_of(source, param, "url")
    refuse(
        f"{param}.type",
        "unsupported_value",
        f'got {shown(kind)}; allowed are "base64" and "url": no files are kept here',
    )


def plain(parts: list[Json]) -> Any:
    """Parts as a chat content: one unmarked text as a string, which is what clients of chat completions send."""
    if len(parts) == 1 and set(parts[0]) == {"type", "text"}:
        return parts[0]["text"]
    return parts


def is_billing_line(block: Any) -> bool:
    """Whether a system block is Claude Code's line for the provider's accounts, which is not meant for the model."""
    return is_object(block) and str(block.get("text", "")).startswith("x-anthropic-billing-header:")
