"""Hooks around SGLang's prefill admission that end a chunk where a checkpoint is wanted; inert with another cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from k3_sglang import compat
from k3_sglang.cache.types import Skip


def states_of(tree_cache: Any) -> Any:
    """Our state component of a cache, None when the cache is another one."""
    component = getattr(tree_cache, "components", {}).get(compat.ComponentType.MAMBA)
    return component if hasattr(component, "chunk_end") else None


def select_admission(original: Callable[..., Any], adder: Any, req: Any, **kwargs: Any) -> Any:
    """Around ``PrefillAdder._select_prefill_admission``: shorten the first chunk of a request to its first cut.

    The scheduler carries one request between two chunks, so while another one is cut, a request enters whole or waits.
    """
    admission = original(adder, req, **kwargs)
    states = states_of(adder.tree_cache)
    if states is None or isinstance(admission, compat.AddReqResult):
        return admission
    carried = adder.new_chunked_req is not None or kwargs.get("has_chunked_req", False)
    if carried and admission.is_chunked:
        return compat.AddReqResult.OTHER
    start = admission.prefix_len
    limit = start + admission.extend_len
    end = states.chunk_end(req, start, limit)
    if end == limit:
        return admission
    if carried:
        states.metrics.skipped[Skip.CUT_BUSY] += 1
        return admission
    states.count_cut(req, end)
    return dataclasses.replace(admission, extend_len=end - start, is_chunked=True, max_new_tokens=0)


def add_chunked(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """Around ``PrefillAdder.add_chunked_req``: shorten a further chunk to the next cut."""
    states = states_of(adder.tree_cache)
    if states is None:
        return original(adder, req)
    limit = len(req.full_untruncated_fill_ids)
    end = states.chunk_end(req, req.prefix_len, limit)
    if end < limit:
        asked = adder.chunked_req_limit
        adder.chunked_req_limit = min(end - req.prefix_len, asked if asked is not None else limit)
    unfinished = original(adder, req)
    if unfinished is not None and req.extend_end == end:
        states.count_cut(req, end)
    return unfinished
