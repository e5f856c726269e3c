"""The released K3 as the planner needs it, so that a plan wants no checkpoint folder."""

from __future__ import annotations

from typing import Final

from k3_sglang.cache.replay.release import RELEASE_TEXT
from k3_sglang.launch.planner.plan import Model

BF16_BYTES = 2

_PATCH, _WIDTH, _QKV, _LAYERS, _MLP, _SIDE, _MERGED = 14, 1024, 1536, 27, 4096, 64, 4096
_BLOCK = 2 * _WIDTH + 3 * _QKV * _WIDTH + _WIDTH * _QKV + 2 * _MLP * _WIDTH
_TOWER = _WIDTH * 3 * _PATCH**2 + _SIDE**2 * _WIDTH + _WIDTH + _LAYERS * _BLOCK
_PROJECTOR = _MERGED**2 + RELEASE_TEXT.hidden_size * _MERGED + RELEASE_TEXT.hidden_size

RELEASE_VISION_PARAMETERS: Final = _TOWER + _PROJECTOR
"""Image tower (401.2 million) and projector (46.1 million) of the release."""

RELEASE: Final = Model("Kimi-K3", RELEASE_TEXT, RELEASE_VISION_PARAMETERS * BF16_BYTES)
"""SGLang's K3 class builds the tower on every rank, also where it serves text only."""
