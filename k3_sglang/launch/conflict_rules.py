"""The table of known-bad combinations: what is set, why that is refused, what to do, and who says so."""

from __future__ import annotations

from typing import Final

from k3_sglang.launch.conflicts import Facts, Rule
from k3_sglang.launch.planner.from_flags import DEFAULT_BLOCK, layout_of, pool_settings_of
from k3_sglang.launch.planner.hardware import GPUS
from k3_sglang.launch.planner.pools import slots_per_request
from k3_sglang.layers.expert_methods import REFUSED, SUPPORT

UP = "SGLang 0.5.23, srt/"
SPECULATIVE = "speculative-algorithm"
DCP_CRASH_CONTEXT: Final = 180_000


def _both(first: bool, text: str) -> str | None:
    return text if first else None


def _speculates(facts: Facts) -> bool:
    return SPECULATIVE in facts.flags


def _runner(facts: Facts) -> str | None:
    """An expert runner that cannot compute K3's experts on this kind of GPU."""
    asked, family = facts.flags.get("moe-runner-backend") or "auto", facts.family
    if not facts.on_gpu or not family:
        return None
    if family.startswith("gfx"):
        return None if asked in ("auto", "aiter") else f"moe-runner-backend {asked} on {facts.gpu}"
    if family == "sm90":
        return None if asked == "marlin" else f"moe-runner-backend {asked} on {facts.gpu}"
    major = int(family.removeprefix("sm")) // 10
    known = {entry.method for entry in SUPPORT if major in entry.families} | {"auto", "megamoe", "flashinfer_megamoe"}
    return None if asked in known else f"moe-runner-backend {asked} on {facts.gpu}"


def _page(facts: Facts) -> str | None:
    """A page that SGLang would change, because its attention kernel for K3 has pages of 32 or 64 only."""
    given = facts.flags.get("page-size")
    backends = {facts.flags.get(f"{kind}attention-backend") for kind in ("", "decode-", "prefill-")} - {None}
    paged = bool(backends & {"trtllm_mla", "cutedsl_mla", "flashmla"}) or (
        not backends and facts.family in ("sm100", "sm103")
    )
    return f"page_size {given}" if facts.on_gpu and paged and given not in (None, "32", "64") else None


def _running(facts: Facts) -> str | None:
    """More requests than the state slots that were asked for let run."""
    if facts.asked_running is None or facts.asked_slots is None:
        return None
    settings = pool_settings_of(facts.flags, GPUS.get(facts.gpu or ""), context_len=1)
    each = slots_per_request(settings, layout_of(facts.flags))
    if facts.asked_running * each <= facts.asked_slots:
        return None
    return (
        f"max_running_requests {facts.asked_running} with state_slots {facts.asked_slots}, of which each takes {each}"
    )


def _ring(facts: Facts) -> str | None:
    """A replay ring that the block of drafts does not fit twice."""
    if not _speculates(facts) or "enable-linear-replayssm-spec" not in facts.flags:
        return None
    ring, block = (
        facts.size("linear-replayssm-cache-len", 16),
        facts.size("speculative-dspark-block-size", DEFAULT_BLOCK),
    )
    fits = ring >= 2 * (block + 1) and ring & (ring - 1) == 0
    return None if fits else f"linear-replayssm-cache-len {ring} with blocks of {block} drafts"


def _own_model(facts: Facts) -> str | None:
    """What this package's model class was never run with on a GPU (layers/gpu.py)."""
    if not (facts.on_gpu and facts.own_model):
        return None
    bad = [name for name in (SPECULATIVE, "enable-eplb", "enable-lora") if name in facts.flags]
    bad += [name for name in ("dcp-size", "attn-dp-size") if facts.size(name) > 1]
    bad += ["ep-num-redundant-experts"] if facts.size("ep-num-redundant-experts", 0) else []
    bad += ["kv-cache-dtype"] if facts.flags.get("kv-cache-dtype") not in (None, "auto", "bf16", "bfloat16") else []
    bad += ["moe-a2a-backend"] if facts.flags.get("moe-a2a-backend") not in (None, "none") else []
    return f"model_impl plugin with {', '.join(bad)}" if bad else None


def _transport(facts: Facts) -> str | None:
    """Expert groups that SGLang would make as large as the tensor-parallel group."""
    transport, ep, tp = facts.flags.get("moe-a2a-backend"), facts.size("ep-size"), facts.size("tp-size")
    return (
        f"ep {ep} with moe-a2a-backend {transport} and tp {tp}"
        if transport not in (None, "none") and ep != tp
        else None
    )


def _megamoe(facts: Facts) -> str | None:
    wanted = "megamoe" in (facts.flags.get("moe-a2a-backend") or "")
    return f"moe-a2a-backend megamoe on {facts.gpu}" if wanted and facts.family in ("sm90", "gfx950") else None


def _eplb(facts: Facts) -> str | None:
    return _both("enable-eplb" in facts.flags and facts.size("ep-size") == 1, "enable-eplb with ep 1")


def _dspark_long(facts: Facts) -> str | None:
    long = facts.size("context-length", 0) > DCP_CRASH_CONTEXT
    text = f"{SPECULATIVE} with dcp {facts.size('dcp-size')} and context_len {facts.flags.get('context-length')}"
    return _both(_speculates(facts) and facts.size("dcp-size") > 1 and long, text)


def _dspark_ragged(facts: Facts) -> str | None:
    mode = (facts.environment or {}).get("SGLANG_RAGGED_VERIFY_MODE", "static")
    bad = facts.flags.get(SPECULATIVE) == "DSPARK" and facts.size("dcp-size") > 1 and mode != "static"
    return _both(bad, f"DSPARK with dcp {facts.size('dcp-size')} and SGLANG_RAGGED_VERIFY_MODE {mode}")


RULES: Final = (
    Rule(
        "speculation on a CPU",
        lambda f: _both(_speculates(f) and not f.on_gpu, f"{SPECULATIVE} on device {f.device}"),
        "K3's verification kernels exist for GPUs only",
        "leave it out",
        f"{UP}arg_groups/speculative_hook.py",
    ),
    Rule(
        "speculation with the k3 cache",
        lambda f: _both(_speculates(f) and f.cache == "k3", f"{SPECULATIVE} with cache k3"),
        "states at exact ends are not kept under speculation",
        "set cache to 'sglang'",
        "k3_sglang/cache/factory.py",
    ),
    Rule(
        "disaggregation with the k3 cache",
        lambda f: _both("disaggregation-mode" in f.flags and f.cache == "k3", "disaggregation with cache k3"),
        "states at exact ends are kept by one engine only",
        "set cache to 'sglang'",
        "k3_sglang/cache/factory.py",
    ),
    Rule(
        "disaggregation on a CPU",
        lambda f: _both("disaggregation-mode" in f.flags and not f.on_gpu, f"disaggregation on device {f.device}"),
        "states and latents travel by GPU transports",
        "leave it out",
        "never run here",
    ),
    Rule(
        "decode context parallelism with the k3 cache",
        lambda f: _both(f.size("dcp-size") > 1 and f.cache == "k3", f"dcp {f.size('dcp-size')} with cache k3"),
        "it widens the pages of the tree, and our placement of states was never run with that",
        "set cache to 'sglang'",
        "docs/cache.md",
    ),
    Rule(
        "decode context parallelism on Hopper",
        lambda f: _both(f.size("dcp-size") > 1 and f.family == "sm90", f"dcp {f.size('dcp-size')} on {f.gpu}"),
        "K3 decodes so with cutedsl_mla (Blackwell) or aiter (AMD) only",
        "leave dcp at 1",
        f"{UP}arg_groups/model_overrides/kimi_k3.py",
    ),
    Rule(
        "decode context parallelism with symmetric memory",
        lambda f: _both(
            f.size("dcp-size") > 1 and "enable-symm-mem" in f.flags, f"dcp {f.size('dcp-size')} with enable-symm-mem"
        ),
        "SGLang switches symmetric memory off, because decode graphs were wrong with it",
        "leave enable-symm-mem out",
        f"{UP}arg_groups/model_overrides/kimi_k3.py",
    ),
    Rule(
        "speculation with decode context parallelism, long contexts",
        _dspark_long,
        "GPUs failed with Xid 13 at 188,000 to 218,000 tokens",
        f"ask for at most {DCP_CRASH_CONTEXT} tokens, or leave dcp at 1",
        "sglang#34920, #32855",
    ),
    Rule(
        "DSpark's ragged verification with decode context parallelism",
        _dspark_ragged,
        "only the static mode was validated",
        "set it to static",
        f"{UP}arg_groups/model_overrides/kimi_k3.py",
    ),
    Rule(
        "DSpark in a pipeline",
        lambda f: _both(
            f.flags.get(SPECULATIVE) == "DSPARK"
            and f.size("pp-size") > 1
            and f.flags.get("disaggregation-mode") != "prefill",
            f"DSPARK with pp {f.size('pp-size')}",
        ),
        "drafts are verified in one stage only",
        "set pp to 1, or use it on a prefill engine",
        f"{UP}arg_groups/speculative_hook.py",
    ),
    Rule(
        "DSpark with attention data parallelism",
        lambda f: _both(
            f.flags.get(SPECULATIVE) == "DSPARK" and f.size("attn-dp-size") > 1 and "enable-dp-lm-head" not in f.flags,
            f"DSPARK with attn_dp {f.size('attn-dp-size')}",
        ),
        "the head has to be split like attention",
        "add enable-dp-lm-head",
        f"{UP}arg_groups/speculative_hook.py",
    ),
    Rule(
        "DSpark without a draft",
        lambda f: _both(
            f.flags.get(SPECULATIVE) == "DSPARK" and "speculative-draft-model-path" not in f.flags,
            "DSPARK without speculative-draft-model-path",
        ),
        "the release holds no draft; SGLang would look into the checkpoint and then ask a hub",
        "give the folder of a K3 DSpark draft",
        f"{UP}arg_groups/speculative_hook.py",
    ),
    Rule(
        "replay ring",
        _ring,
        "the ring has to be a power of two and hold two blocks with their anchors",
        "set it to the next power of two of 2 x (block + 1)",
        "sglang#35861",
    ),
    Rule(
        "replay ring on a prefill engine",
        lambda f: _both(
            "enable-linear-replayssm-spec" in f.flags and f.flags.get("disaggregation-mode") == "prefill",
            "enable-linear-replayssm-spec on a prefill engine",
        ),
        "a prefill engine verifies nothing",
        "leave it out there",
        f"{UP}arg_groups/attention_hook.py",
    ),
    Rule(
        "expert runner",
        _runner,
        "it unpacks experts to bfloat16, four times their size, or applies SwiGLU instead of SiTU "
        f"({', '.join(sorted(REFUSED))})",
        "use marlin on Hopper, flashinfer_mxfp4 or marlin on Blackwell, auto on AMD",
        "sglang#35554, #33884; k3_sglang/layers/expert_methods.py",
    ),
    Rule(
        "page size",
        _page,
        "this attention kernel has pages of 32 or 64 tokens, and SGLang would take 64 whatever is asked for",
        "set page_size to 64, or choose the attention backend triton",
        f"{UP}arg_groups/overrides.py",
    ),
    Rule(
        "running requests",
        _running,
        "SGLang would run fewer without an error",
        "raise state_slots or lower max_running_requests",
        f"sglang#33004; {UP}mem_cache/kv_cache_configurator.py",
    ),
    Rule(
        "our model class on a GPU",
        _own_model,
        "this class was never written for it or run with it",
        "set model_impl to 'auto'",
        "k3_sglang/layers/gpu.py",
    ),
    Rule(
        "expert groups of a transport",
        _transport,
        "SGLang makes the groups as large as tp, whatever is asked for",
        "set ep to tp",
        f"{UP}arg_groups/overrides.py",
    ),
    Rule(
        "MegaMoE",
        _megamoe,
        "its kernels for MXFP4 experts are Blackwell's",
        "leave moe-a2a-backend out",
        f"{UP}arg_groups/mega_moe_hook.py",
    ),
    Rule(
        "expert balancing",
        _eplb,
        "there is nothing to balance: every rank holds a part of every expert",
        "raise ep",
        f"{UP}arg_groups/parallel_hook.py",
    ),
    Rule(
        "int8 states of SGLang with the host tier",
        lambda f: _both(
            "enable-int8-mamba-checkpoint" in f.flags
            and bool({"enable-hierarchical-cache", "enable-hicache"} & set(f.flags)),
            "enable-int8-mamba-checkpoint with the host tier",
        ),
        "the host tier would read them as states of running requests",
        "leave one of them out",
        f"{UP}arg_groups/mamba_hook.py",
    ),
    Rule(
        "stored checkpoints with the host tier",
        lambda f: _both(
            f.checkpoint_format != "state"
            and bool({"enable-hierarchical-cache", "enable-hicache", "enable-unified-memory"} & set(f.flags)),
            f"checkpoint_format {f.checkpoint_format} with the host tier or unified memory",
        ),
        "their code takes a checkpoint for a slot of the running states",
        "set checkpoint_format to 'state'",
        "docs/cache.md",
    ),
    Rule(
        "overlapped steps in a pipeline",
        lambda f: _both(f.asked_overlap and f.size("pp-size") > 1, f"overlap on with pp {f.size('pp-size')}"),
        "SGLang switches overlapped steps off in a pipeline",
        "leave overlap at auto",
        f"{UP}arg_groups/overrides.py",
    ),
    Rule(
        "FP8 latents on a CPU",
        lambda f: _both(
            not f.on_gpu and (f.flags.get("kv-cache-dtype") or "auto") not in ("auto", "bf16", "bfloat16"),
            f"kv-cache-dtype {f.flags.get('kv-cache-dtype')} on device {f.device}",
        ),
        "the CPU has no FP8 latents",
        "leave it out",
        f"{UP}mem_cache/kv_cache_configurator.py",
    ),
)
"""Checked in this order; every broken one is told."""
