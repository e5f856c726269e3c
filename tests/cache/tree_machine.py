"""A program, run by the tests in a process of its own: random operations on SGLang's real tree with our components.

The engine around the tree is re-enacted with SGLang's own request object and its own functions for matching,
checkpointing and releasing. The model is a rolling hash: the state after n tokens is the hash of these n tokens, and
the KV of a token is the hash up to it. Whatever the cache hands out is compared with a computation without a cache.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from array import array
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.mem_cache.allocation import ensure_mamba_capacity
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import mamba_track_grid
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture

from k3_sglang import compat
from k3_sglang.cache.dump import dump
from k3_sglang.cache.factory import components
from k3_sglang.cache.hints import PARAMETER
from k3_sglang.cache.integrity import check_integrity
from k3_sglang.cache.metrics import Metrics
from k3_sglang.cache.placement import PlacementSettings
from tests.cache.script import run_and_leave

MODULUS = (1 << 61) - 1
MAX_CONTEXT = 1024


def step(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % MODULUS


def states_of(tokens: list[int]) -> list[int]:
    """The state before any token, after the first, after the second, ..."""
    states = [0]
    for token in tokens:
        states.append(step(states[-1], token))
    return states


@dataclass(frozen=True)
class Case:
    """One sequence of random operations."""

    seed: int
    page: int
    chunk: int
    extra_buffer: bool
    slots: int
    kv_tokens: int
    operations: int
    ahead: bool
    """The next pass is launched before the scheduler looks at the result of one, as with overlapped steps."""


@cache
def server_args(page: int) -> Any:
    arguments = compat.ServerArgs(model_path="dummy", page_size=page)
    arguments._mamba_cache_chunk_size = max(64, page)
    return arguments


@cache
def tree(page: int, extra_buffer: bool, slots: int, kv_tokens: int) -> tuple[Any, Any, Any]:
    """SGLang's own fixture with our components, one for each shape; every sequence ends with a flush."""
    config = CacheConfig(
        page_size=page,
        components=(compat.ComponentType.FULL, compat.ComponentType.MAMBA),
        num_layers=2,
        full_attention_layer_ids=(1,),
        enable_mamba_extra_buffer=extra_buffer,
        mamba_cache_size=slots,
        mamba_intermediate_size=16,
        mamba_num_heads=1,
        kv_size=kv_tokens,
        max_num_reqs=6,
        max_context_len=MAX_CONTEXT,
        head_num=1,
        head_dim=8,
    )
    ours = components()
    kind = compat.ComponentType.MAMBA
    eager = type("Eager", (ours[kind],), {"placement": PlacementSettings(pass_tokens=2)})  # prompts are short here
    return build_fixture(config, component_registry_override={**ours, kind: eager})


class Machine:
    """A toy engine on the real cache."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.chooser = random.Random(case.seed)
        self.cache, self.kv_pool, self.rows = tree(case.page, case.extra_buffer, case.slots, case.kv_tokens)
        # A page's size is fixed when the tree is built, but SGLang asks its global settings for the grid.
        set_global_server_args_for_scheduler(server_args(case.page))
        self.states: Any = self.cache.components[compat.ComponentType.MAMBA]
        self.states.metrics = Metrics()
        self.states.snapshots.in_use = False
        self.slot_state: dict[int, int] = {}
        self.rows.mamba_pool.copy_from = self.copy_states
        self.kv: dict[int, int] = {}
        self.live: list[Any] = []
        self.texts: list[list[int]] = [[]]
        self.count = 0
        self.seen: Counter[str] = Counter()

    # --- operations -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A request whose prompt forks from something seen before."""
        # Its own slot, the checkpoint it holds on to, and spare ones.
        held = 4 if self.case.extra_buffer else 3 if self.case.page > 1 else 2
        if len(self.live) >= 5 or (len(self.live) + 1) * held > self.case.slots:
            return self.decode()
        base = self.chooser.choice(self.texts)
        cut = self.chooser.choice([len(base), len(base), self.chooser.randint(0, len(base))])
        new = [self.chooser.randrange(50) for _ in range(self.chooser.choice([1, 5, 30, 100, 200]))]
        prompt = (base[:cut] + new)[-(MAX_CONTEXT // 2) :] if cut + len(new) > MAX_CONTEXT // 2 else base[:cut] + new
        hints = self.chooser.choice(
            [None, None, {"head_len": len(prompt) // 2}, {"session": "s", "boundaries": [cut]}, {"bad": 1}]
        )
        if self.fits(len(prompt) + 2):
            self.begin(prompt, {PARAMETER: hints} if hints else None)
        return None

    def begin(self, prompt: list[int], custom: Any = None) -> Any:
        """A request up to the end of its prompt, or until it is aborted."""
        req: Any = Req(
            rid=f"r{self.count}",
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=400, custom_params=custom),
        )
        self.count += 1
        req.init_next_round_input(self.cache)
        self.expect_true_prefix(req)
        req.lock = self.cache.lock(req.last_node)
        assert ensure_mamba_capacity(self.rows, [req], self.cache), "a running request found no slot"
        indices = self.cache.prefix_device_indices(req) if req.prefix_len else None
        assert self.rows.alloc([req]) is not None
        slot = int(req.kv.mamba_pool_idx)
        source = req.kv.mamba_cow_src_index
        self.slot_state[slot] = self.slot_state[int(source)] if source is not None else 0
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
        if indices is not None:
            self.rows.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), indices[: req.prefix_len].int())
        self.live.append(req)
        self.prefill(req)
        return req

    def prefill(self, req: Any) -> None:
        """Chunks up to the end of the prompt; now and then the request is aborted between two."""
        prompt_len = len(req.full_untruncated_fill_ids)
        while req.prefix_len < prompt_len:
            limit = min((req.prefix_len + self.case.chunk) // self.case.page * self.case.page, prompt_len)
            limit = max(limit, min(req.prefix_len + self.case.page, prompt_len))
            req.extend_end = self.states.chunk_end(req, req.prefix_len, limit)
            if req.extend_end < limit:
                self.states.count_cut(req, req.extend_end)
            if not self.compute(req, req.prefix_len, req.extend_end, extend=True):
                return self.end(req, checkpoint=False)
            if self.case.extra_buffer:
                self.track_prefill(req)
            if req.extend_end < prompt_len and self.chooser.random() < 0.03:
                self.seen["aborted_in_prefill"] += 1
                return self.end(req, checkpoint=False)
            if req.extend_end == prompt_len:
                req.output_ids.append(self.chooser.randrange(50))
                self.run_ahead(req)
            checkpoint_kv_cache(req, self.cache)
            self.check()
        return None

    def decode(self) -> None:
        """A few tokens for one request, which may finish."""
        if not self.live:
            return
        req = self.chooser.choice(self.live)
        for _ in range(self.chooser.choice([1, 3, 20, 70])):
            length = req.kv.kv_committed_len
            if length + 2 >= MAX_CONTEXT:
                break
            if not self.is_ahead(req) and not self.compute(req, length, length + 1):
                break
            if self.case.extra_buffer and (length + 1) % mamba_track_grid(self.cache.page_size) == 0:
                self.track_decode(req)
            req.output_ids.append(self.chooser.randrange(50))
            self.run_ahead(req)
        if self.chooser.random() < 0.5:
            self.end(req, checkpoint=True)

    def finish(self) -> None:
        if self.live:
            self.end(self.chooser.choice(self.live), checkpoint=True)

    def abort(self) -> None:
        if self.live:
            self.seen["aborted"] += 1
            self.end(self.chooser.choice(self.live), checkpoint=self.chooser.random() < 0.5, aborted=True)

    def retract(self) -> None:
        """As when the KV pool is full: nothing of the request is kept, and it comes back as a new one."""
        if self.live:
            req = self.chooser.choice(self.live)
            self.seen["retracted"] += 1
            self.live.remove(req)
            self.texts.append(list(req.origin_input_ids) + list(req.output_ids))
            release_kv_cache(req, self.cache, checkpoint=False)

    def evict(self) -> None:
        tokens, slots = self.chooser.choice([(0, 1), (0, 3), (40, 0), (200, 1)])
        self.cache.evict(EvictParams(num_tokens=tokens, mamba_num=slots))

    def flush(self) -> None:
        while self.live:
            self.end(self.live[0], checkpoint=True)
        self.check()
        self.cache.sanity_check()
        self.cache.reset()
        self.rows.clear()
        self.rows.mamba_allocator.clear()
        self.kv_pool.clear()
        self.check()
        assert self.rows.mamba_allocator.available_size() == self.case.slots
        assert self.kv_pool.available_size() == self.case.kv_tokens

    def copy_states(self, sources: Any, targets: Any) -> None:
        """In place of the pool's copy between slots."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.slot_state[target] = self.slot_state[source]

    # --- the engine's parts ---------------------------------------------------------------------------------------

    def fits(self, tokens: int) -> bool:
        return self.kv_pool.available_size() + self.cache.full_evictable_size() >= tokens + self.case.chunk

    def is_ahead(self, req: Any) -> bool:
        """The last token sampled has been computed already."""
        return req.kv.kv_committed_len == len(req.origin_input_ids) + len(req.output_ids)

    def run_ahead(self, req: Any) -> None:
        """The step after the one whose result is about to be looked at."""
        if self.case.ahead and req.kv.kv_committed_len + 2 < MAX_CONTEXT:
            self.compute(req, req.kv.kv_committed_len, req.kv.kv_committed_len + 1)

    def compute(self, req: Any, start: int, end: int, extend: bool = False) -> bool:
        """KV and state of tokens [start, end). False when no KV is left."""
        short = end - start - self.kv_pool.available_size()
        if short > 0:
            self.cache.evict_for_alloc(EvictParams(num_tokens=short))
        places = self.kv_pool.alloc(end - start)
        if places is None:
            return False
        self.rows.write((req.kv.req_pool_idx, slice(start, end)), places.int())
        req.kv.kv_committed_len = req.kv.kv_allocated_len = end
        self.plan(req, end, extend)
        slot = int(req.kv.mamba_pool_idx)
        tokens = list(req.origin_input_ids) + list(req.output_ids)
        assert self.slot_state[slot] == states_of(tokens[:start])[-1], "the request's own state is not its prefix's"
        self.snapshots = {}
        for place, token in zip(places.tolist(), tokens[start:end], strict=True):
            self.slot_state[slot] = step(self.slot_state[slot], token)
            self.kv[place] = self.slot_state[slot]
            self.snapshots[start + len(self.snapshots) + 1] = self.slot_state[slot]
        self.states.snapshots.copy()
        return True

    def plan(self, req: Any, end: int, extend: bool) -> None:
        """As the scheduler does when it launches a pass."""
        if not self.case.extra_buffer:
            mode = ForwardMode.EXTEND if extend else ForwardMode.DECODE
            lengths = torch.tensor([end])
            batch = SimpleNamespace(reqs=[req], forward_mode=mode, decoding_reqs=None, seq_lens_cpu=lengths)
            self.states.snapshots.plan(batch)

    def track_prefill(self, req: Any) -> None:
        """SGLang says which position of the chunk is to be kept and in which of the request's two spare slots."""
        batch = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
            tree_cache=self.cache,
            req_to_token_pool=self.rows,
        )
        kept = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, req)  # type: ignore[arg-type]
        if kept.track_mask:
            spare = int(req.kv.mamba_ping_pong_track_buffer[kept.track_position])
            self.slot_state[spare] = self.snapshots[req.kv.mamba_last_track_seqlen]

    def track_decode(self, req: Any) -> None:
        kv = req.kv
        spare = int(kv.mamba_ping_pong_track_buffer[kv.mamba_next_track_idx])
        self.slot_state[spare] = self.slot_state[int(kv.mamba_pool_idx)]
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
        kv.mamba_last_track_seqlen = kv.kv_committed_len
        kv.mamba_next_track_idx = self.rows.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)

    def end(self, req: Any, checkpoint: bool, aborted: bool = False) -> None:
        self.live.remove(req)
        req.finished_reason = FINISH_ABORT("test") if aborted else FINISH_LENGTH(length=len(req.output_ids))
        self.texts.append(list(req.origin_input_ids) + list(req.output_ids))
        self.texts = self.texts[-12:]
        release_kv_cache(req, self.cache, checkpoint=checkpoint)

    # --- the oracle -----------------------------------------------------------------------------------------------

    def expect_true_prefix(self, req: Any) -> None:
        """What was matched is what computing the prefix from the start would give."""
        length = req.prefix_len
        self.seen["prompt_tokens"] += len(req.origin_input_ids)
        self.seen["cached_tokens"] += length
        if not length:
            return
        truth = states_of(list(req.origin_input_ids)[:length])
        places = self.cache.prefix_device_indices(req)[:length].tolist()
        assert [self.kv[place] for place in places] == truth[1:], "KV of another prefix"
        assert self.slot_state[int(req.kv.mamba_cow_src_index)] == truth[-1], "state of another prefix"
        self.seen["hits"] += 1

    def check(self) -> None:
        """Index and tree agree; every slot and every token of KV has exactly one owner."""
        check_integrity(self.states)
        held = []
        for req in self.live:
            held.append(int(req.kv.mamba_pool_idx))
            if self.states.notes(req).snapshot is not None:
                held.append(int(self.states.notes(req).snapshot.slot))
            if req.kv.mamba_ping_pong_track_buffer is not None:
                held += [slot for slot in req.kv.mamba_ping_pong_track_buffer.tolist() if slot >= 0]
        tree = self.cache.all_mamba_values_flatten().tolist()
        free = self.rows.mamba_allocator.available_size()
        assert len(set(tree) | set(held)) == len(tree) + len(held), "a slot has two owners"
        assert len(tree) + len(held) + free == self.case.slots, "a slot is lost"
        owned = sum(req.kv.kv_committed_len - req.kv.cache_protected_len for req in self.live)
        kept = self.cache.full_evictable_size() + self.cache.full_protected_size()
        assert owned + kept + self.kv_pool.available_size() == self.case.kv_tokens, "KV is lost"

    def run(self) -> Counter[str]:
        operations = [self.start, self.decode, self.finish, self.abort, self.evict, self.retract, self.flush]
        for _ in range(self.case.operations):
            self.chooser.choices(operations, [45, 25, 12, 6, 6, 3, 1])[0]()
            self.check()
        self.flush()
        metrics = self.states.metrics
        assert metrics.resynchronised == 0
        json.dumps(dump(self.states))
        self.seen.update({"made": metrics.made, "cuts": sum(metrics.cuts.values())})
        self.seen.update({f"evicted_{role.value}": count for role, count in metrics.evicted.items()})
        self.seen.update({f"skipped_{reason.value}": count for reason, count in metrics.skipped.items()})
        return self.seen


def main() -> int:
    """Run the cases of standard input, one JSON object a line; print what was seen, or the failing case."""
    total: Counter[str] = Counter()
    for line in sys.stdin:
        case = Case(**json.loads(line))
        try:
            total.update(Machine(case).run())
        except Exception:
            print(f"failed: {json.dumps(asdict(case))}\n{traceback.format_exc()}")
            return 1
        total["sequences"] += 1
    print(json.dumps(total))
    return 0


if __name__ == "__main__":
    run_and_leave(main)
