"""The rows of the table: names on the command line -> a way to serve the load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from k3_sglang.cache.replay.bound import Options, clairvoyant_bound, find_options, one_pool, split_pools
from k3_sglang.cache.replay.budget import Budget
from k3_sglang.cache.replay.driver import Served, replay, run_loop
from k3_sglang.cache.replay.engines import TokenSpeed, VllmAlign, VllmAll, tuned_marconi
from k3_sglang.cache.replay.flops import PromptCost
from k3_sglang.cache.replay.k3 import COMPONENTS, build_k3
from k3_sglang.cache.replay.light import LightCache
from k3_sglang.cache.replay.light_upstream import LightUpstream
from k3_sglang.cache.replay.models import ModelCache, replay_model
from k3_sglang.cache.replay.rig import Rig, UpstreamFlags, build_kv_only, build_upstream, load_object
from k3_sglang.cache.replay.schedule import Step

MODELS: dict[str, type[VllmAlign] | type[TokenSpeed]] = {
    "vllm-align": VllmAlign,
    "vllm-all": VllmAll,
    "tokenspeed": TokenSpeed,
}
BOUNDS = ("bound", "bound-one-pool")
DEFAULT = "k3,k3:hints,kv-only,upstream,upstream-best,vllm-align,tokenspeed,marconi,bound,bound-one-pool"
HELP = """\
k3  k3:hints                 this project's checkpoint cache, without and with the hints an agent runtime can give
upstream                     SGLang's cache with default flags
upstream:cap=2,interval=64   with --mamba-max-states-per-path 2 and --mamba-track-interval 64; also: no_buffer
upstream-best                the best of --search-caps, then of --search-intervals, searched for every cell
kv-only                      SGLang's cache without states: every cached token can be resumed from
component:package.module:Class   SGLang's tree with another state component, live states kept at their exact end
build:package.module:function    the Rig that function(budget, context_len) returns: own placement, hints, component
vllm-align  vllm-all  tokenspeed  marconi    models, one pool of the same bytes for states and KV, as those engines have
vllm-align:divided  and so on    the same rules on two pools divided as SGLang's: compares rules, not pools
bound  bound-one-pool        least that must be computed, future known; memory divided as given, or one pool"""


class PolicyError(ValueError):
    """A policy name that cannot be understood."""


@dataclass(frozen=True)
class Outcome:
    """What one policy did in one cell."""

    policy: str
    detail: str
    served: list[Served] | None
    """One entry per step; None for a bound, which has totals only."""
    computed_tokens: float
    computed_at_most: float | None = None
    """For a bound: tokens of its feasible plan."""


@dataclass(frozen=True)
class Cell:
    """One column of work: a load and a budget."""

    steps: Sequence[Step]
    budget: Budget
    serial: bool
    cost: PromptCost
    search_caps: tuple[int, ...] = (1, 2, 3, 5)
    search_intervals: tuple[int, ...] = (256,)
    light: bool = False
    """``k3`` and ``upstream`` on a tree of our own, with the same hits and an order of magnitude faster."""

    @property
    def context_len(self) -> int:
        """Longest path in units, with room for a page."""
        longest = max(step.path_tokens for step in self.steps)
        return longest // self.budget.grain + 2 * max(self.budget.page // self.budget.grain, 1) + 1


OnStep = Callable[[], None]


def passes(policy: str, cell: Cell) -> int:
    """How often the load is replayed for a policy, for the progress bar."""
    if policy == "upstream-best":
        return len(cell.search_caps) + len(cell.search_intervals)
    return 0 if policy in BOUNDS else 1


def check(policy: str) -> None:
    """Refuse a name that cannot be run, before any work is done.

    Raises:
        PolicyError: the name is unknown or its part after the colon is wrong.
    """
    kind, _, rest = policy.partition(":")
    try:
        if kind in ("component", "build"):
            load_object(rest)
        elif kind == "upstream":
            upstream_flags(rest)
        elif kind == "k3" and rest in ("", "hints"):
            load_object(COMPONENTS)
        elif kind in ("marconi", *MODELS) and rest in ("", "divided"):
            return
        elif rest or kind not in ("upstream-best", "kv-only", *BOUNDS):
            raise PolicyError(f"policy {policy!r} is unknown; known:\n{HELP}")
    except ValueError as error:
        raise error if isinstance(error, PolicyError) else PolicyError(f"policy {policy!r}: {error}") from error


def upstream_flags(text: str) -> UpstreamFlags:
    """``cap=2,interval=64,no_buffer`` as flags.

    Raises:
        PolicyError: an unknown flag or a value that is not a positive number.
    """
    flags = UpstreamFlags()
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if part == "no_buffer":
            flags = replace(flags, extra_buffer=False)
        elif name in ("cap", "interval") and value.isdigit() and int(value) > 0:
            field = "max_states_per_path" if name == "cap" else "track_interval"
            flags = replace(flags, **{field: int(value)})
        else:
            raise PolicyError(f"{part!r} is not a flag; allowed: cap=N, interval=N, no_buffer")
    return flags


def run(policy: str, cell: Cell, options: Options | None = None, on_step: OnStep | None = None) -> Outcome:
    """Serve the cell's load with one policy.

    Raises:
        PolicyError: unknown policy.
        BudgetError: a request does not fit into the memory of the cell.
    """
    check(policy)
    kind, _, rest = policy.partition(":")
    if kind in BOUNDS:
        return _bound(policy, cell, options)
    if kind == "upstream-best":
        return _search(cell, on_step)
    if kind in MODELS:
        return _model(policy, MODELS[kind](cell.budget, divided=bool(rest)), "", cell, on_step)
    if kind == "marconi":
        model = tuned_marconi(cell.budget, cell.cost.span, cell.steps, serial=cell.serial, divided=bool(rest))
        return _model(policy, model, f"alpha {model.alpha:g}", cell, on_step)
    if kind == "kv-only":
        return _real(policy, build_kv_only(cell.budget, context_len=cell.context_len), "", cell, on_step)
    if kind == "upstream":
        return _upstream(policy, upstream_flags(rest), "", cell, on_step)
    if kind == "k3" and cell.light:
        served = run_loop(
            LightCache(cell.budget, hinted=bool(rest)), cell.steps, serial=cell.serial, on_step=_ticking(on_step)
        )
        return Outcome(policy, "", served, sum(one.computed_tokens for one in served))
    if kind == "k3":
        rig = build_k3(cell.budget, cell.context_len, hinted=bool(rest))
        return _real(policy, rig, "", cell, on_step)
    if kind == "component":
        from k3_sglang import compat

        flags = UpstreamFlags(extra_buffer=False)
        components = {compat.ComponentType.MAMBA: load_object(rest)}
        rig = build_upstream(cell.budget, flags, components, context_len=cell.context_len)
        return _real(policy, rig, "", cell, on_step)
    return _real(policy, load_object(rest)(cell.budget, cell.context_len), "", cell, on_step)


def _search(cell: Cell, on_step: OnStep | None) -> Outcome:
    """The best cap at the first interval, then the best interval for that cap."""
    intervals = cell.search_intervals

    def tried(cap: int, interval: int) -> tuple[float, int, Outcome]:
        flags = UpstreamFlags(cap, interval)
        outcome = _upstream("upstream-best", flags, str(flags), cell, on_step)
        return outcome.computed_tokens, cap, outcome

    best = min((tried(cap, intervals[0]) for cap in (-1, *cell.search_caps)), key=lambda one: one[:2])
    more = [tried(best[1], interval) for interval in intervals[1:]]
    return min([best, *more], key=lambda one: one[0])[2]


def _upstream(policy: str, flags: UpstreamFlags, detail: str, cell: Cell, on_step: OnStep | None) -> Outcome:
    if cell.light:
        loop = LightUpstream(cell.budget, flags)
        served = run_loop(loop, cell.steps, serial=cell.serial, on_step=_ticking(on_step))
        return Outcome(policy, detail, served, sum(one.computed_tokens for one in served))
    return _real(policy, build_upstream(cell.budget, flags, context_len=cell.context_len), detail, cell, on_step)


def _real(policy: str, rig: Rig, detail: str, cell: Cell, on_step: OnStep | None) -> Outcome:
    served = replay(rig, cell.steps, serial=cell.serial, on_step=_ticking(on_step))
    return Outcome(policy, detail, served, sum(one.computed_tokens for one in served))


def _model(policy: str, model: ModelCache, detail: str, cell: Cell, on_step: OnStep | None) -> Outcome:
    served = replay_model(model, cell.steps, serial=cell.serial, on_step=_ticking(on_step))
    return Outcome(policy, detail, served, sum(one.computed_tokens for one in served))


def _ticking(on_step: OnStep | None) -> Callable[[Step, Served], None] | None:
    return None if on_step is None else lambda _step, _served: on_step()


def _bound(policy: str, cell: Cell, options: Options | None) -> Outcome:
    if options is None:
        options = find_options(cell.steps, cell.budget.grain)
    pools = split_pools(cell.budget, options) if policy == "bound" else one_pool(cell.budget, options)
    bound = clairvoyant_bound(options, pools)
    detail = f"plan {bound.plan_tokens / 1e6:.2f} M; unlimited memory {bound.unlimited_tokens / 1e6:.2f} M"
    return Outcome(policy, detail, None, bound.computed_tokens, bound.plan_tokens)
