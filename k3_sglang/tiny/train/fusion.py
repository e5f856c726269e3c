"""Compile the pointwise parts of the trainer when a C++ compiler is there; otherwise run them as they are."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch._dynamo

_LOG = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")

_state = {"enabled": False}


def enable_fusion() -> bool:
    """Let functions marked :func:`fused` be compiled from now on; says (and logs) whether a compiler was found."""
    found = any(shutil.which(name) for name in ("g++", "clang++", "c++"))
    if not found:
        _LOG.warning("no C++ compiler found: pointwise operations are not fused, training is about half as fast")
    _state["enabled"] = found
    # Each function meets a handful of ranks, widths and strides; the default of 8 variants gives up silently.
    torch._dynamo.config.recompile_limit = 64
    return found


def fused(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark a function of tensors as worth compiling; shapes may differ from call to call."""
    compiled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        nonlocal compiled
        if not _state["enabled"]:
            return function(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(function, dynamic=True)
        return compiled(*args, **kwargs)

    return call
