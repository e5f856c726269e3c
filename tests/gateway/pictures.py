"""Small pictures and how a request carries them, and a checkpoint folder whose model sees."""

import base64
import io
import json
from pathlib import Path
from typing import Any, Final

from PIL import Image

MEDIA: Final[dict[str, Any]] = {
    "in_patch_limit": 65536,
    "patch_limit_on_one_side": 512,
    "patch_size": 14,
    "merge_kernel_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "fixed_output_tokens": None,
    "transparent_bg_fill_stage": "after_resize",
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
}
"""The release's rules: 28 x 28 pixels are one token."""


def picture(width: int = 28, height: int = 28, colour: str = "red", kind: str = "PNG", **options: Any) -> bytes:
    """A picture's file."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, kind, **options)
    return buffer.getvalue()


def data_url(content: bytes, kind: str = "png") -> str:
    """The picture as a data URL."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def content_of(url: str) -> bytes:
    """The picture inside a data URL."""
    return base64.b64decode(url.partition(",")[2], validate=True)


def image_part(url: str) -> dict[str, Any]:
    """An image part as OpenAI's clients write it."""
    return {"type": "image_url", "image_url": {"url": url}}


def look(*urls: str, text: str = "What is this?") -> list[dict[str, Any]]:
    """The content of a question about pictures."""
    return [*(image_part(url) for url in urls), {"type": "text", "text": text}]


def about(*urls: str, **fields: Any) -> dict[str, Any]:
    """A request with one question about pictures."""
    return {"model": "kimi-k3", "messages": [{"role": "user", "content": look(*urls)}], **fields}


def give_sight(checkpoint: Path) -> None:
    """Make a folder look like a checkpoint with an image tower, as far as a gateway reads it."""
    (checkpoint / "config.json").write_text(json.dumps({"vision_config": {}}), "utf-8")
    (checkpoint / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": MEDIA}), "utf-8")
