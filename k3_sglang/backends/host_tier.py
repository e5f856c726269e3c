"""SGLang's host tier on a machine without a GPU: its copies between pools, which it has as CUDA kernels only.

The "device" is then memory of the same kind, so the tier saves nothing; it is for trying the prefix cache with it, with
``--hicache-io-backend direct --hicache-mem-layout page_first_direct``. Host pools hold all layers of a row together,
[pages, layers, page size, ...]; device pools have one tensor per layer, rows first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from k3_sglang import compat

if TYPE_CHECKING:
    from torch import Tensor


def to_device(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy the rows of one layer from the host pool.

    Args:
        src_ptrs: the host pool, alone in its list. dst_ptrs: that layer of the device pool.
        src_indices, dst_indices: int64 [n], rows.
    """
    (host,), (device,) = src_ptrs, dst_ptrs
    device[dst_indices] = host[src_indices // page_size, layer_id, src_indices % page_size]


def to_host(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy rows of all layers to the host pool; the arguments mirror :func:`to_device`."""
    (host,) = dst_ptrs
    for layer_id, device in enumerate(src_ptrs):
        host[dst_indices // page_size, layer_id, dst_indices % page_size] = device[src_indices]


COPIES = {"transfer_kv_per_layer_direct_pf_lf": to_device, "transfer_kv_all_layer_direct_lf_pf": to_host}
"""Our functions by the names under which SGLang's pools look for its own."""


def provide_copies(*args: Any, **kwargs: Any) -> None:
    """Before ``UnifiedRadixCache.init_hicache``: put the functions where the modules of the pools would have theirs."""
    for module in (compat.host_latents, compat.host_states):
        for name, copy in COPIES.items():
            if not hasattr(module, name):
                setattr(module, name, copy)
