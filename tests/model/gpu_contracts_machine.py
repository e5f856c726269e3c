"""What gpu_contracts.py stands on: a machine SGLang takes for one with a GPU, and a recording attention backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_context, get_flags, get_parallel, override_platform

HOPPER = {"is_cuda": True, "is_sm90": True, "is_sm100": False, "is_sm120": False, "device_capability": (9, 0)}
BLACKWELL = {"is_cuda": True, "is_sm90": False, "is_sm100": True, "is_sm120": False, "device_capability": (10, 0)}
AMPERE = {"is_cuda": True, "is_sm90": False, "is_sm100": False, "is_sm120": False, "device_capability": (8, 0)}


@contextmanager
def engine(machine: dict[str, Any], ranks: tuple[int, int, int] = (0, 1, 1), **arguments: Any) -> Iterator[None]:
    """A published configuration and a place in the layout: (rank, tensor-parallel size, expert-parallel size)."""
    rank, size, expert_groups = ranks
    inner = size // expert_groups
    fields = {"tp_size": size, "ep_size": expert_groups, "attention_backend": "flashinfer", **arguments}
    published = get_context().override_server_args(**fields)
    published.install()
    get_flags().moe.runner_backend = MoeRunnerBackend(arguments.get("moe_runner_backend", "auto"))
    place = {
        "tp_rank": rank,
        "attn_tp_rank": rank,
        "moe_ep_rank": rank // inner,
        "moe_tp_rank": rank % inner,
        "tp_group": SimpleNamespace(world_size=size, rank_in_group=rank),
    }
    try:
        with override_platform(**machine), get_parallel().override(**place):
            yield
    finally:
        published.restore()


def raises(call: Callable[[], object]) -> str:
    """Type and text of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def describe(value: Any, flat: bool = False) -> Any:
    """Shape and dtype of a tensor (its size alone where any shape will do); other values as they are."""
    if isinstance(value, torch.Tensor):
        return f"{value.numel() if flat else tuple(value.shape)} {value.dtype}"
    return value


class Recorded(Exception):
    """Ends a forward pass at the attention backend."""


class Recorder:
    """Stands where an attention backend stands and keeps what it is given."""

    def __init__(self, answer: Callable[..., torch.Tensor] | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.answer = answer
        self.token_to_kv_pool = self
        self.prefill_attention_backend_str = self.decode_attention_backend_str = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What RadixAttention and RadixLinearAttention call."""
        names = ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")
        self.calls.append({**dict(zip(names, args, strict=False)), **kwargs})
        if self.answer is None:
            raise Recorded
        return self.answer(recorder=self, **self.calls[-1])

    def set_mla_kv_buffer(self, layer: Any, loc: Any, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor) -> None:
        """What the layer writes by itself."""
        self.calls.append({"written": torch.cat((cache_k_nope, cache_k_rope), -1), "layer": layer})


def attending(recorder: Recorder) -> Any:
    """A forward pass in which layers find this attention backend."""
    return forward_context(ForwardContext(attn_backend=cast(Any, recorder)))


def batch(mode: ForwardMode, prefix_lens: list[int] | None = None, tokens: int = 4) -> Any:
    """What our layers and SGLang's wrappers read of a batch."""
    return SimpleNamespace(
        forward_mode=mode,
        logical_forward_mode=mode,
        extend_prefix_lens_cpu=prefix_lens,
        global_num_token_non_padded_cpu=None,
        out_cache_loc=torch.arange(tokens),
        out_cache_loc_is_physical=True,
        mha_return_lse=False,
    )
