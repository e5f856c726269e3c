"""Commands that look at the cache of a running engine: its counters, its tree, and whether index and tree agree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from k3_sglang.cache.dump import dump
from k3_sglang.cache.integrity import problems
from k3_sglang.cache.remote import CommandError, command


@command("metrics")
def _metrics(states: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    _nothing(body)
    return {"metrics": states.metrics.as_json()}


@command("dump")
def _dump(states: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    _nothing(body)
    return dump(states)


@command("check", every_rank=True)
def _check(states: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Disagreements found, and a digest of all checkpoints in which the ranks of one group must agree."""
    _nothing(body)
    index = states._index()
    facts = sorted((c.key, c.depth, c.last_use, c.role.value, c.locked) for c in index)
    return {
        "problems": problems(states),
        "checkpoints": len(index),
        "digest": hashlib.sha256(repr(facts).encode()).hexdigest(),
    }


def _nothing(body: Mapping[str, Any]) -> None:
    if body:
        raise CommandError(f"{min(body)!r} is not known; this command takes no parameters")


@command("states")
def _states(states: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """A digest of the bytes of every checkpoint's state, by node. Reads all of them from the device."""
    import torch

    _nothing(body)
    rows, core = states.cache.req_to_token_pool, states.tree_core
    store, running = getattr(rows, "mamba_ckpt_pool", None), rows.mamba_pool.mamba_cache
    digests: dict[str, str] = {}
    for checkpoint in states._index():
        slot = core.get_component_device_value(checkpoint.key, states.component_type)
        if store is not None:
            held = store.kept(int(slot))
        else:
            place = int(rows.translate_mamba_indices(slot))
            held = [pool[:, place] for pool in (*running.conv, running.temporal)]
        digest = hashlib.sha256()
        for tensor in held:
            digest.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
        digests[str(checkpoint.key)] = digest.hexdigest()
    return {"states": digests}
