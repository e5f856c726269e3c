"""Which of SGLang's MoE runners can compute K3's MXFP4 experts on a device: a table, a choice, refusals that list it.

SGLang's own choice (``--moe-runner-backend auto``) is not relied on: outside the devices it names it unpacks experts to
bfloat16, four times their size, and two runners apply SwiGLU to them, because they never ask for the activation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Method = Literal["flashinfer_mxfp4", "marlin", "deep_gemm"]
"""Names of ``--moe-runner-backend``."""

Part = Literal["flashinfer_situ", "marlin", "deep_gemm"]
"""Software a method needs: FlashInfer with the SiTU activation, the Marlin MoE kernels, the deep_gemm package."""


@dataclass(frozen=True)
class Support:
    """One method on one family of devices."""

    method: Method
    families: tuple[int, ...]
    """Major numbers of the compute capability."""
    needs: Part
    activations: str
    """What the experts' inputs are rounded to."""
    source: str
    """Where in SGLang 0.5.23 this was read (below ``sglang/srt/layers``)."""


SUPPORT: Final = (
    Support(
        "flashinfer_mxfp4",
        (10,),
        "flashinfer_situ",
        "MXFP8, or bfloat16 with --flashinfer-mxfp4-moe-precision bf16",
        "quantization/mxfp4.py (trtllm_sm100), moe/moe_runner/flashinfer_trtllm.py (ActivationType.Situ)",
    ),
    Support(
        "marlin",
        (9, 10, 12),
        "marlin",
        "bfloat16",
        "quantization/mxfp4.py, moe/fused_moe_triton/fused_marlin_moe.py (situ_and_mul)",
    ),
    Support(
        "deep_gemm",
        (10,),
        "deep_gemm",
        "FP8 in groups of 128",
        "quantization/mxfp4.py, moe/moe_runner/deep_gemm.py (situ)",
    ),
)
"""Methods that compute SiTU over packed experts; ``auto`` takes the first that fits, deep_gemm only on request."""

REFUSED: Final = {
    "flashinfer_mxfp4": "outside compute capability 10.x it applies SwiGLU instead of SiTU "
    "(moe/moe_runner/flashinfer_cutlass.py)",
    "triton_kernel": "it applies SwiGLU instead of SiTU (moe/fused_moe_triton/triton_kernels_moe.py)",
    "triton": "it unpacks all experts to bfloat16, four times their size (quantization/mxfp4.py)",
}
"""Runners that SGLang would start and that must not run K3's experts, with the reason."""


class ExpertMethodError(ValueError):
    """No, or not this, MoE runner for K3's MXFP4 experts on this device; the message lists what the device supports."""


def choose_expert_method(asked: str, *, capability: tuple[int, int], parts: frozenset[Part]) -> Method:
    """Decide which runner computes the routed experts.

    Args:
        asked: value of ``--moe-runner-backend``; ``auto`` lets this function choose.
        capability: compute capability of the device, (9, 0) for Hopper.
        parts: software that is installed.

    Raises:
        ExpertMethodError: the device has no method, or not the one asked for.
    """
    on_device = [entry for entry in SUPPORT if capability[0] in entry.families]
    usable: list[Method] = [entry.method for entry in on_device if entry.needs in parts]
    if asked in usable:
        return next(method for method in usable if method == asked)
    if asked == "auto":
        for method in usable:
            if method != "deep_gemm":
                return method
    raise ExpertMethodError(_refusal(asked, capability, on_device, usable))


def _refusal(asked: str, capability: tuple[int, int], on_device: list[Support], usable: list[Method]) -> str:
    device = f"compute capability {capability[0]}.{capability[1]}"
    if not on_device:
        families = sorted({family for entry in SUPPORT for family in entry.families})
        return (
            f"MXFP4 experts: no method on {device} (moe-runner-backend is {asked!r}); "
            f"devices that have one: {', '.join(f'{family}.x' for family in families)}"
        )
    listed = "; ".join(f"{entry.method} ({_state(entry, usable)})" for entry in on_device)
    reason = f": {REFUSED[asked]}" if asked in REFUSED and asked not in [entry.method for entry in on_device] else ""
    remedy = f"use --moe-runner-backend {usable[0]}" if usable else "install one of them"
    return (
        f"MXFP4 experts: moe-runner-backend {asked!r} cannot compute them on {device}{reason}; "
        f"supported there: {listed}; {remedy}"
    )


def _state(entry: Support, usable: list[Method]) -> str:
    return "ready" if entry.method in usable else f"not installed: {entry.needs}"
