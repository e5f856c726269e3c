"""This project's own cache in the replay: its components on SGLang's tree, chunks cut where it wants checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3_sglang import compat
from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.hinting import step_hints
from k3_sglang.cache.replay.rig import Rig, UpstreamFlags, build_upstream, load_object
from k3_sglang.cache.replay.schedule import Step

COMPONENTS = "k3_sglang.cache.factory:components"
"""Function that returns the component classes; named as text so that the replay runs without them, too."""

SLOTS_PER_REQUEST = 2
"""Working state and the checkpoint it was copied from: no snapshot buffers."""


def build_k3(budget: Budget, context_len: int, *, hinted: bool) -> Rig:
    """The checkpoint cache, with the hints a runtime could give or with none.

    With pages of one tree key, states are kept at their exact end. Larger pages need SGLang's snapshot buffers.
    """
    exact = budget.page <= budget.grain
    components = load_object(COMPONENTS)()
    rig = build_upstream(budget, UpstreamFlags(extra_buffer=not exact), components, context_len=context_len)
    states = rig.cache.components[compat.ComponentType.MAMBA]
    # The only constant of the policy that is a length; everything else is a ratio.
    states.placement = replace(states.placement, pass_tokens=budget.units(states.placement.pass_tokens))
    longest = budget.units(budget.chunk)

    def chunks(prefix_len: int, prompt_len: int, req: Any, match: Any) -> list[int]:
        ends: list[int] = []
        start = prefix_len
        while start < prompt_len:
            start = states.chunk_end(req, start, min(start + longest, prompt_len))
            ends.append(start)
        return ends

    def hints(step: Step) -> dict[str, Any]:
        return step_hints(step, budget.grain)

    return replace(
        rig,
        chunks=chunks,
        hints=hints if hinted else None,
        slots_per_request=SLOTS_PER_REQUEST if exact else rig.slots_per_request,
    )
