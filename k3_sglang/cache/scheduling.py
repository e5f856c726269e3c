"""Hooks around SGLang's prefill admission: chunks end at wanted checkpoints, common heads are computed once.

All of them do nothing when another cache is in use.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

from k3_sglang import compat
from k3_sglang.cache.types import INFO, Skip


def states_of(tree_cache: Any) -> Any:
    """Our state component of a cache, None when the cache is another one."""
    component = getattr(tree_cache, "components", {}).get(compat.ComponentType.MAMBA)
    return component if hasattr(component, "chunk_end") else None


def order_waiting(result: Any, policy: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any) -> None:
    """After ``SchedulePolicy.calc_priority``: requests that wait for another's checkpoint go behind the rest."""
    states = states_of(policy.tree_cache)
    if states is None or not waiting_queue:
        return
    enter(states, waiting_queue)
    behind = {id(req) for req in waiting_queue if must_wait(states, req, req.prefix_len)}
    if behind:
        held = [req for req in waiting_queue if id(req) in behind]
        waiting_queue[:] = [req for req in waiting_queue if id(req) not in behind] + held


def enter(states: Any, waiting_queue: list[Any]) -> None:
    """Tell the fan-out who waits; a request whose leader is gone without a checkpoint for it looks for another."""
    fan_out = states.fan_out
    waiting = {id(req) for req in waiting_queue}
    fan_out.present({w.number for w in fan_out if w.number in waiting or w.holder.kv.holds_kv})
    for req in waiting_queue:
        waiter = states.notes(req).waiter
        if waiter is not None and waiter.leader is not None and waiter.leader.gone:
            fan_out.leave(waiter.number)
            states.notes(req).waiter = None
    for req in waiting_queue:
        notes = states.notes(req)
        own_namespace = req.extra_key is not None or req.cache_salt is not None
        if notes.waiter is None and not req.output_ids and not own_namespace:
            notes.waiter = fan_out.enter(id(req), array("q", req.origin_input_ids))
            notes.waiter.holder = req


def must_wait(states: Any, req: Any, cached: int) -> bool:
    """Whether a request should wait for another one that computes their common beginning."""
    waiter = states.notes(req).waiter
    return waiter is not None and states.fan_out.must_wait(waiter, cached)


def select_admission(original: Callable[..., Any], adder: Any, req: Any, **kwargs: Any) -> Any:
    """Around ``PrefillAdder._select_prefill_admission``: shorten the first chunk of a request to its first cut.

    The scheduler carries one request between two chunks, so while another one is cut, a request enters whole or waits.
    """
    states = states_of(adder.tree_cache)
    if states is not None and must_wait(states, req, req.prefix_len):
        states.notes(req).waiter.rounds += 1
        states.metrics.waited_rounds += 1
        return compat.AddReqResult.OTHER
    admission = original(adder, req, **kwargs)
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


def told_once(original: Callable[..., Any], streamer: Any, key: str) -> Any:
    """Around ``SchedulerOutputStreamer.is_request_level_customized_info_key``: ours is said once per request."""
    return key == INFO or original(streamer, key)
