"""Content parts of Responses items to those of chat messages."""

from typing import Any

from k3_sglang.chat.json_types import is_list
from k3_sglang.chat.request_fields import refuse, refuse_unknown, required_object, shown, wrong_type

_TEXT_KINDS = ("input_text", "output_text", "text")
_TEXT_KEYS = frozenset(("type", "text"))
_IMAGE_KEYS = frozenset(("type", "image_url", "detail", "file_id"))
_REFUSED_PARTS = {
    "input_file": "files are not read here; send their text",
    "input_audio": "the model hears nothing; send text",
}


def parts_of(value: Any, param: str) -> str | list[dict[str, Any]]:
    """Content of a user or system message, or a tool's output. Raises ChatRequestError."""
    if isinstance(value, str):
        return value
    if not is_list(value):
        wrong_type(param, value, "a string or a list of input_text and input_image parts")
    return [_part(required_object(part, f"{param}[{at}]"), f"{param}[{at}]") for at, part in enumerate(value)]


def text_of(value: Any, param: str) -> str:
    """Content of an assistant message, its parts joined; they carry output and may have more keys."""
    if isinstance(value, str):
        return value
    if not is_list(value):
        wrong_type(param, value, "a string or a list of output_text parts")
    texts: list[str] = []
    for at, part in enumerate(value):
        part = required_object(part, f"{param}[{at}]")
        kind = part.get("type")
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if kind not in (*_TEXT_KINDS, "refusal") or not isinstance(text, str):
            wrong_type(f"{param}[{at}]", part, '{"type": "output_text", "text": "..."} or a refusal')
        texts.append(text)
    return "".join(texts)


def _part(part: dict[str, Any], param: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind in _TEXT_KINDS:
        if not isinstance(part.get("text"), str):
            wrong_type(f"{param}.text", part.get("text"), "a string")
        refuse_unknown(part, _TEXT_KEYS, param, f"a part of type {kind}")
        return {"type": "text", "text": part["text"]}
    if kind == "input_image":
        return _image(part, param)
    if isinstance(kind, str) and kind in _REFUSED_PARTS:
        refuse(f"{param}.type", "unsupported_part", f"got {shown(kind)}; {_REFUSED_PARTS[kind]}")
    refuse(f"{param}.type", "unsupported_part", f"got {shown(kind)}; allowed are input_text and input_image")


def _image(part: dict[str, Any], param: str) -> dict[str, Any]:
    refuse_unknown(part, _IMAGE_KEYS, param, "an image part")
    if part.get("file_id") is not None:
        refuse(f"{param}.file_id", "unsupported_field", "no files are stored here; send the picture as image_url")
    url = part.get("image_url")
    if not isinstance(url, str):
        wrong_type(f"{param}.image_url", url, "the picture's URL (data:, or one that the server may fetch)")
    image = {"url": url}
    if part.get("detail") is not None:
        image["detail"] = part["detail"]
    return {"type": "image_url", "image_url": image}
