"""How a model is dealt out over GPUs: tensor, pipeline, expert, attention-data and decode-context parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from k3_sglang.config import TextConfig

NO_TRANSPORT = "none"
"""SGLang's name for experts without an all-to-all transport: every rank sees every token."""

MXFP4_GROUP = 32


@dataclass(frozen=True)
class Layout:
    """Sizes of SGLang's groups; ``tp`` is the whole group of one pipeline stage, as SGLang counts it."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attn_dp: int = 1
    """Groups inside ``tp`` that serve different requests, each with attention of its own."""
    dcp: int = 1
    """Ranks inside an attention group over which the latents of one request are dealt out."""
    nodes: int = 1
    transport: str = NO_TRANSPORT
    """``--moe-a2a-backend``."""
    shared_tp: int = 1
    """Ranks over which the shared experts are split beside a transport (``--shared-experts-tp-size``)."""
    redundant_experts: int = 0
    """Further copies of experts per layer, for balancing (``--ep-num-redundant-experts``)."""

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.tp * self.pp

    @property
    def attn_tp(self) -> int:
        """Ranks that share the attention of one request."""
        return self.tp // self.attn_dp

    @property
    def text(self) -> str:
        """For people: ``TP16 EP16, 2 nodes``."""
        sizes = {"TP": self.tp, "PP": self.pp, "EP": self.ep, "attention DP": self.attn_dp, "DCP": self.dcp}
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "TP"]
        return " ".join(words) + (f", {self.nodes} nodes" if self.nodes > 1 else "")


def layout_problems(layout: Layout, text: TextConfig) -> list[str]:
    """Why SGLang or K3 cannot be dealt out like this; one line each, with what is allowed."""
    found: list[str] = []
    divides = [
        ("attn_dp", layout.attn_dp, layout.tp, f"tp, {layout.tp}"),
        ("ep", layout.ep, layout.tp, f"tp, {layout.tp}"),
        ("ep", layout.ep, text.moe.num_experts + layout.redundant_experts, f"the {text.moe.num_experts} experts"),
        ("nodes", layout.nodes, layout.gpus, f"tp x pp, {layout.gpus}"),
    ]
    found += [f"{name} is {size}; it must divide {what}" for name, size, total, what in divides if total % size]
    if found:
        return found
    for heads, kind in ((text.kda.num_heads, "KDA"), (text.mla.num_heads, "MLA")):
        if heads % layout.attn_tp:
            fitting = [str(size) for size in range(1, heads + 1) if heads % size == 0]
            found.append(
                f"tp / attn_dp is {layout.attn_tp}; it must divide the {heads} {kind} heads: {', '.join(fitting)}"
            )
    if layout.attn_tp % layout.dcp:
        found.append(f"dcp is {layout.dcp}; it must divide tp / attn_dp, {layout.attn_tp}")
    width_ranks = layout.tp // layout.ep
    if text.experts_packed and text.moe.intermediate_size % (width_ranks * MXFP4_GROUP):
        found.append(
            f"tp / ep is {width_ranks}; packed experts of width {text.moe.intermediate_size} need a multiple of "
            f"{MXFP4_GROUP} on each: raise ep"
        )
    if layout.pp > text.num_layers:
        found.append(f"pp is {layout.pp}; the model has {text.num_layers} layers: ask for at most that")
    return found


def stages(num_layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage; SGLang gives the layers that are left over to the last stages, one each."""
    base, over = divmod(num_layers, pp)
    result: list[range] = []
    start = 0
    for rank in range(pp):
        size = base + (rank >= pp - over)
        result.append(range(start, start + size))
        start += size
    return result
