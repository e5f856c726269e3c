"""SGLang platform for machines without a GPU and without sgl-kernel's CPU build (which is not on the registry)."""

from __future__ import annotations

import os
from typing import Any

from k3_sglang.compat import CpuDeviceMixin, PlatformCapabilities, PlatformEnum, SRTPlatform

ATTENTION_BACKEND = "k3_cpu"
"""Name under which :mod:`k3_sglang.backends.mla_cpu` is registered with SGLang."""

CONV_STATE_DTYPE_ENV = "SGLANG_MAMBA_CONV_DTYPE"
WAIT_POLICY_ENV = "OMP_WAIT_POLICY"

STATE_DTYPES = ("float32", "bfloat16", "float16")
"""Values of ``--dtype`` that name a dtype; ``auto`` is bfloat16 for K3, which is upstream's default."""


def resolve() -> str | None:
    """Entry point of group ``sglang.srt.platforms``: our platform's dotted name, or None to leave the machine alone.

    Returns None when an accelerator is usable (upstream's platform and kernels then stay in place) and when the user
    asked for upstream's own CPU engine with ``SGLANG_USE_CPU_ENGINE=1``.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or accelerator_present():
        return None
    return f"{K3CpuPlatform.__module__}.{K3CpuPlatform.__qualname__}"


def accelerator_present() -> bool:
    """Whether torch sees any device other than the CPU."""
    import torch

    return bool(torch.accelerator.is_available())


class K3CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain-PyTorch CPU: core takes its torch-native allocators, sampling and scheduling paths."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    supported_quantization = ["compressed-tensors"]
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Defaults for what the user left open.

        Convolution states take the dtype of the activations they are copied from: upstream's default of bfloat16 would
        make a prefix hit round what a cold run does not. Threads that wait for each other sleep instead of spinning: on
        a machine whose cores also run the gateway and its clients, spinning makes a prefill ten times slower. Engine
        processes started later inherit the environment.
        """
        if server_args.dtype in STATE_DTYPES:
            os.environ.setdefault(CONV_STATE_DTYPE_ENV, server_args.dtype)
        os.environ.setdefault(WAIT_POLICY_ENV, "PASSIVE")

    def get_dispatch_key_name(self) -> str:
        """Dispatch key of multi-platform ops: the plain PyTorch forward."""
        return "native"

    def get_default_attention_backend(self) -> str:
        """Attention backend used when the command line names none."""
        return ATTENTION_BACKEND

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Our KDA backend writes the tracked snapshots that the ``extra_buffer`` strategy keeps."""
        return True

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """Never: there is no device to pin host memory for."""
        return False
