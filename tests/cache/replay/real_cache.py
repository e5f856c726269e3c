"""Program: replays a trace on SGLang's real cache and prints hits and what is left in the pools, as JSON.

A program of its own because SGLang must not be imported into the test process. Arguments: a JSON object with ``trace``,
``jobs`` (policy names and budgets) and the load's settings.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from k3_sglang.cache.replay import policies
from k3_sglang.cache.replay.bound import clairvoyant_bound, find_options, split_pools
from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.driver import replay, run_loop
from k3_sglang.cache.replay.k3 import build_k3
from k3_sglang.cache.replay.light import LightCache
from k3_sglang.cache.replay.light_upstream import LightUpstream
from k3_sglang.cache.replay.rig import Rig, UpstreamFlags, build_kv_only, build_upstream
from k3_sglang.cache.replay.schedule import Pacing, Step, make_steps
from k3_sglang.cache.replay.traces import read_trace

UPSTREAM_COMPONENT = "sglang.srt.mem_cache.unified_cache.components.mamba:MambaComponent"
"""SGLang's own class, given by name as one's own would be."""


def build(policy: str, budget: Budget, context_len: int) -> Rig:
    """The cache behind a policy name of this program."""
    if policy == "kv-only":
        return build_kv_only(budget, context_len=context_len)
    if policy.startswith("k3"):
        return build_k3(budget, context_len, hinted=policy == "k3:hints")
    if policy == "by-name":
        from k3_sglang import compat

        components = {compat.ComponentType.MAMBA: policies.load_object(UPSTREAM_COMPONENT)}
        return build_upstream(budget, UpstreamFlags(extra_buffer=False), components, context_len=context_len)
    return build_upstream(budget, policies.upstream_flags(policy), context_len=context_len)


def run(job: dict[str, Any], steps: list[Step], serial: bool) -> dict[str, Any]:
    """Replay one job and look into the pools afterwards."""
    budget = Budget(job["states"], job["kv_tokens"], 1, 1, job.get("grain", 64), job.get("page", 1), job["chunk"])
    longest = max(step.path_tokens for step in steps)
    rig = build(job["policy"], budget, longest // budget.grain + 2 * budget.page + 1)
    served = replay(rig, steps, serial=serial)
    cache = rig.cache
    cache.sanity_check()
    kv_left = cache.token_to_kv_pool_allocator.available_size() + cache.full_evictable_size()
    states_left = budget.states
    if cache.supports_mamba():
        states_left = rig.req_to_token_pool.mamba_allocator.available_size() + cache.mamba_evictable_size()
    options = find_options(steps, budget.grain)
    bound = clairvoyant_bound(options, split_pools(budget, options), iterations=60)
    return {
        "hits": [one.hit_tokens for one in served],
        "kv_hits": [one.kv_hit_tokens for one in served],
        "prompts": [one.prompt_tokens for one in served],
        "passes": [one.chunks for one in served],
        "kv_left": kv_left * budget.grain,
        "states_left": states_left,
        "bound": bound.computed_tokens,
        "light": light_hits(job["policy"], budget, steps, serial),
    }


def light_hits(policy: str, budget: Budget, steps: list[Step], serial: bool) -> list[int] | None:
    """Hits of the same policy on the tree without an engine; None where it has none."""
    if policy in ("kv-only", "by-name") or budget.page > budget.grain:
        return None
    if policy.startswith("k3"):
        loop = LightCache(budget, hinted=policy == "k3:hints")
    else:
        loop = LightUpstream(budget, policies.upstream_flags(policy))
    return [one.hit_tokens for one in run_loop(loop, steps, serial=serial)]


def main() -> None:
    """Run all jobs."""
    warnings.simplefilter("ignore")
    request = json.loads(sys.argv[1])
    results = []
    for job in request["jobs"]:
        trace = read_trace(Path(job["trace"]))
        serial = job.get("serial", True)
        steps = make_steps(trace, Pacing(job.get("concurrent", 1), serial=serial))
        results.append(run(job, steps, serial))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
