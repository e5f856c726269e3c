"""The trained tiny K3 that is part of the package: where its checkpoint lies, and the names of both tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Final

TRAINED: Final = "tiny"
"""Name of the trained model, for the launcher."""

RANDOM: Final = "tiny-random"
"""Name of the untrained one (:func:`k3_sglang.tiny.ensure`)."""


def trained() -> Path:
    """Directory of the trained checkpoint, in the release's layout; read only. ``docs/tiny-model.md`` is its card."""
    return Path(__file__).parent / "shipped"
