"""Routed experts on a GPU: SGLang's FusedMoE layer over MXFP4 weights, with SiTU and our own routing.

What SGLang's layer calls things: ``hidden_size`` is the latent width; ``gemm1_alpha`` and ``gemm1_clamp_limit`` carry
SiTU's two constants when ``activation`` is "situ"; ``gate_up_interleaved=False`` says that w13 holds w1 (gate) in its
upper half and w3 (up) in its lower one. Mixing weights arrive complete: no scaling factor is applied after us.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from k3_sglang.compat import (
    FusedMoE,
    MoeRunnerBackend,
    Mxfp4Config,
    Mxfp4MoEMethod,
    StandardTopKOutput,
    get_flags,
    get_moe_a2a_backend,
    get_moe_runner_backend,
    get_platform,
)
from k3_sglang.config import MoEConfig, SituConfig
from k3_sglang.kernels.mxfp4 import GROUP_SIZE
from k3_sglang.layers.expert_methods import ExpertMethodError, Method, Part, choose_expert_method
from k3_sglang.layers.expert_weights import PackedMatrix
from k3_sglang.layers.parallel import Ranks


class ReloadableMxfp4Method(Mxfp4MoEMethod):
    """SGLang's MXFP4 method, made safe to call twice: it rewrites weights for its kernels in place of those loaded.

    SGLang's loader calls ``process_weights_after_loading`` once per module and load, and
    ``restore_weights_before_loading`` before it loads again.
    """

    as_loaded = False
    """Whether the parameters have the checkpoint's layout."""

    def create_weights(self, layer: torch.nn.Module, *args: object, **kwargs: object) -> None:
        """Make parameters in the checkpoint's layout; remembers how, to make them again."""
        self._recipe = args, kwargs
        super().create_weights(layer, *args, **kwargs)
        self.as_loaded = True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Rewrite the weights for the kernels, unless that is done."""
        if self.as_loaded:
            super().process_weights_after_loading(layer)
            self.as_loaded = False

    def restore_weights_before_loading(self, layer: torch.nn.Module) -> None:
        """Parameters in the checkpoint's layout again; the rewritten ones are let go.

        They have new addresses: a captured CUDA graph must be captured again.
        """
        if self.as_loaded:
            return
        device = next(layer.parameters()).device
        for name in [name for name, _ in layer.named_parameters(recurse=False)]:
            delattr(layer, name)
        args, kwargs = self._recipe
        with torch.device(device):
            self.create_weights(layer, *args, **kwargs)


class FusedExperts(torch.nn.Module):
    """The routed experts of a layer on a GPU; experts and widths are split as SGLang's layer splits them."""

    def __init__(self, moe: MoEConfig, situ: SituConfig, layer: int, ranks: Ranks) -> None:
        """Build SGLang's layer with the method this device supports.

        Raises:
            ExpertMethodError: the device, the engine's settings or the dtype leave no method.
        """
        super().__init__()
        width = ranks.within_expert.share(moe.intermediate_size, "moe_intermediate_size")
        if width % GROUP_SIZE:
            raise ExpertMethodError(
                f"experts of width {width} per rank cannot stay packed: MXFP4 shares a scale over {GROUP_SIZE} "
                "values; use fewer tensor-parallel ranks or more expert-parallel groups"
            )
        self.held, self.total = ranks.experts(moe.num_experts), moe.num_experts
        self._width, self._latent = width, moe.latent_size
        self.method = method_of_engine()
        with _runner_backend(self.method):
            quantization = Mxfp4Config(is_checkpoint_mxfp4_serialized=True)
            self.fused = FusedMoE(
                num_experts=moe.num_experts,
                top_k=moe.experts_per_token,
                hidden_size=moe.latent_size,
                intermediate_size=moe.intermediate_size,
                layer_id=layer,
                quant_config=quantization,
                quant_method=ReloadableMxfp4Method(prefix=f"model.layers.{layer}.block_sparse_moe.experts"),
                activation="situ",
                gemm1_alpha=situ.beta,
                gemm1_clamp_limit=situ.linear_beta,
                gate_up_interleaved=False,
                inplace=False,
            )
        held = (self.fused.moe_ep_rank * self.fused.num_local_experts, self.fused.num_local_experts)
        if held != (self.held.start, len(self.held)):
            raise ExpertMethodError(
                f"SGLang deals experts {held[0]}..{sum(held) - 1} to this rank, our layout {self.held.start}.."
                f"{self.held.stop - 1}; start without expert redundancy or elastic expert parallelism"
            )

    def packed(self, expert: int) -> tuple[PackedMatrix, PackedMatrix, PackedMatrix]:
        """Where w1, w3 and w2 of an expert held here are loaded to, without the padding that kernels want.

        Raises:
            RuntimeError: the parameters are rewritten for the kernels; SGLang restores them before it loads.
        """
        if not self.fused.quant_method.as_loaded:
            raise RuntimeError("the experts are in their kernels' layout; restore_weights_before_loading comes first")
        place = expert - self.held.start
        w13, w2 = self.fused.w13_weight.data[place], self.fused.w2_weight.data[place]
        w13_scale, w2_scale = self.fused.w13_weight_scale.data[place], self.fused.w2_weight_scale.data[place]
        up, latent, width = w13.shape[0] // 2, self._latent, self._width
        return (
            (w13[:width, : latent // 2], w13_scale[:width, : latent // GROUP_SIZE]),
            (w13[up : up + width, : latent // 2], w13_scale[up : up + width, : latent // GROUP_SIZE]),
            (w2[:latent, : width // 2], w2_scale[:latent, : width // GROUP_SIZE]),
        )

    def forward(self, latent: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum of the chosen experts' outputs, this rank's part of it.

        Args:
            latent: [T, L] bfloat16.
            ids: [T, k] chosen experts, of all ranks. weights: [T, k] fp32 mixing weights.

        Returns:
            [T, L] bfloat16.
        """
        # The kernels read ids as int32; router logits are used for their length alone (fused_marlin_moe).
        chosen = StandardTopKOutput(topk_weights=weights, topk_ids=ids.to(torch.int32), router_logits=weights)
        return self.fused(latent.contiguous(), chosen)


def method_of_engine() -> Method:
    """The MoE runner for this process's device, from SGLang's settings and what is installed.

    Raises:
        ExpertMethodError: none; the message lists what the device supports.
    """
    platform = get_platform()
    if not platform.is_cuda:
        raise ExpertMethodError(
            "experts is 'fused', which needs an NVIDIA GPU; use packed or unpacked on a CPU, "
            "and --model-impl sglang on other accelerators"
        )
    dtype = torch.get_default_dtype()
    if dtype != torch.bfloat16:
        raise ExpertMethodError(f"MXFP4 experts on a GPU take bfloat16, dtype is {dtype}; use --dtype bfloat16")
    transport = get_moe_a2a_backend()
    if not transport.is_none():
        raise ExpertMethodError(
            f"moe-a2a-backend {transport.value!r} is not supported by this K3 model class; start without it"
        )
    asked = str(get_moe_runner_backend().value)
    return choose_expert_method(asked, capability=tuple(platform.device_capability), parts=installed_parts())


def installed_parts() -> frozenset[Part]:
    """Software for expert methods found here; nothing of it is run."""
    parts: set[Part] = set()
    if importlib.util.find_spec("flashinfer") is not None:
        from flashinfer.tllm_enums import ActivationType

        if hasattr(ActivationType, "Situ"):
            parts.add("flashinfer_situ")
    if importlib.util.find_spec("sgl_kernel") is not None:
        parts.add("marlin")
    if importlib.util.find_spec("deep_gemm") is not None:
        parts.add("deep_gemm")
    return frozenset(parts)


@contextmanager
def _runner_backend(method: Method) -> Iterator[None]:
    """SGLang's layers read the runner from process-wide flags while they are built."""
    flags = get_flags().moe
    before = flags.runner_backend
    flags.runner_backend = MoeRunnerBackend(method)
    try:
        yield
    finally:
        flags.runner_backend = before
