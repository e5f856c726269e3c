"""Program of test_triton_kda.py: SGLang's KDA kernels for GPUs, run by Triton's interpreter on the CPU, beside ours.

Run as a process of its own with TRITON_INTERPRET=1; the last line of output is JSON, differences by case. Three things
keep the kernels from running under the interpreter as they are, and are put right before they are imported:

- The autotuner measures on a device: each kernel is pinned to its first configuration.
- SGLang binds builtins to plain names (``exp = tl.exp``); the interpreter replaces builtins only where they are reached
  through the ``triton.language`` module.
- The interpreter keeps bfloat16 as 16-bit integers and multiplies those: operands of a dot are converted first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from k3_sglang.kernels.kda import fold_gate, folded_gate, kda_chunk, kda_decode, normalise_qk

HEADS, WIDTH, SLOTS, LOWER_BOUND = 2, 32, 5, -5.0


class Pinned:
    """A kernel with one configuration, launched as an autotuned one is."""

    def __init__(self, kernel: Any, config: Any) -> None:
        self._kernel, self._arguments = kernel, dict(config.kwargs)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self._kernel[grid]
        return lambda *args, **kwargs: launch(*args, **{**self._arguments, **kwargs})

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Called by decorators outside this one."""
        return self._kernel.run(*args, **{**self._arguments, **kwargs})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def pin_first_configuration(configs: Sequence[Any], key: Any = None, **_: Any) -> Callable[[Any], Pinned]:
    """In the place of ``triton.autotune``."""
    return lambda kernel: Pinned(kernel, configs[0])


def convert_bfloat16_in_dots() -> None:
    """Give the interpreter's dot float32 operands where the kernel has bfloat16 ones; the values are the same."""
    original = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = interpreter._convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> interpreter.TensorHandle:
        return original(self, widened(a), widened(b), d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.create_dot = create_dot


def make_kernels_interpretable() -> None:
    """Before the kernels' modules are imported."""
    triton.autotune = pin_first_configuration
    convert_bfloat16_in_dots()
    from sglang.kernels.ops.attention.fla import op

    op.exp = lambda x: tl.exp(x)
    op.exp2 = lambda x: tl.math.exp2(x)
    op.log = lambda x: tl.log(x)
    op.gather = lambda source, index, axis: tl.gather(source, index, axis)


class Layer:
    """Random inputs of one KDA layer, and what our kernels make of them."""

    def __init__(self, tokens: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.qkv = torch.randn(tokens, 3 * HEADS * WIDTH)
        self.forget = torch.randn(tokens, HEADS * WIDTH)
        self.beta = torch.randn(tokens, HEADS)
        self.a_log, self.dt_bias = torch.randn(HEADS) * 0.3, torch.randn(HEADS * WIDTH) - 3
        self.pool = torch.randn(SLOTS, HEADS, WIDTH, WIDTH)

    def ours(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g, beta as our kernels take them."""
        rate, shift = fold_gate(self.a_log, self.dt_bias, LOWER_BOUND)
        gate = folded_gate(self.forget, rate, shift, LOWER_BOUND, HEADS)
        return (*normalise_qk(self.qkv, HEADS), gate, torch.sigmoid(self.beta))


def decode_case(fused_decode: Callable[..., Any]) -> dict[str, float]:
    """One token of three sequences."""
    layer, slots = Layer(3, seed=0), torch.tensor([3, 1, 4])
    pool, out = layer.pool.clone(), torch.empty(3, 1, HEADS, WIDTH)
    fused_decode(
        layer.qkv,
        layer.forget,
        layer.beta,
        layer.a_log,
        layer.dt_bias,
        WIDTH**-0.5,
        pool,
        out,
        slots.int(),
        use_qk_l2norm_in_kernel=True,
        lower_bound=LOWER_BOUND,
    )
    wanted_pool = layer.pool.clone()
    q, k, v, g, beta = layer.ours()
    wanted = kda_decode(q, k, v, g, beta, wanted_pool, slots)
    return differences(out[:, 0], wanted, pool, wanted_pool)


def prefill_case(chunk_kda: Callable[..., Any], lens: Sequence[int]) -> dict[str, float]:
    """Packed sequences that continue from states of the pool."""
    layer = Layer(sum(lens), seed=len(lens))
    edges = [sum(lens[:i]) for i in range(len(lens) + 1)]
    slots = torch.tensor([3, 1, 4][: len(lens)])
    q, k, v = (part.unflatten(-1, (HEADS, WIDTH)).unsqueeze(0).contiguous() for part in layer.qkv.chunk(3, -1))
    pool = layer.pool.clone()
    out = chunk_kda(
        q=q,
        k=k,
        v=v,
        g=layer.forget.view(1, -1, HEADS, WIDTH),
        beta=torch.sigmoid(layer.beta).unsqueeze(0),
        initial_state=pool,
        initial_state_indices=slots.int(),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor(edges, dtype=torch.int32),
        A_log=layer.a_log,
        dt_bias=layer.dt_bias,
        lower_bound=LOWER_BOUND,
    )
    wanted, wanted_pool = torch.empty_like(out[0]), layer.pool.clone()
    for slot, start, end in zip(slots.tolist(), edges, edges[1:], strict=False):
        q, k, v, g, beta = (part[start:end] for part in layer.ours())
        wanted[start:end], wanted_pool[slot] = kda_chunk(q, k, v, g, beta, layer.pool[slot])
    return differences(out[0], wanted, pool, wanted_pool)


def differences(out: Tensor, wanted: Tensor, pool: Tensor, wanted_pool: Tensor) -> dict[str, float]:
    """Largest difference over largest value, of outputs and of the whole pool, untouched slots included."""
    return {
        "output": ((out - wanted).abs().max() / wanted.abs().max()).item(),
        "state": ((pool - wanted_pool).abs().max() / wanted_pool.abs().max()).item(),
    }


def main() -> None:
    """All cases."""
    make_kernels_interpretable()
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_kda_packed_decode
    from sglang.kernels.ops.attention.fla.kda import chunk_kda

    found = {"decode": decode_case(fused_recurrent_kda_packed_decode)}
    for lens in ([16, 5, 1], [64], [17, 70]):
        found[f"prefill {'+'.join(map(str, lens))}"] = prefill_case(chunk_kda, lens)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
