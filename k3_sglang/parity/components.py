"""Values inside the model, as a running engine computed and kept them, against golden ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from k3_sglang.parity.compare import (
    MAX_FEATURE_ERROR,
    MAX_RELATIVE_ERROR,
    MAX_ROUTER_WEIGHT_ERROR,
    relative_error,
)
from k3_sglang.parity.golden import Golden
from k3_sglang.reference.attention import Trace


@dataclass(frozen=True)
class Pass:
    """One recorded forward pass (see :mod:`k3_sglang.debug_dump`)."""

    mode: str
    prefix_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    snapshot_lens: tuple[int, ...]
    values: dict[str, Tensor]


@dataclass(frozen=True)
class Component:
    """One line of the component table: the worst tensor of a kind."""

    name: str
    tensors: int
    max_abs: float
    error: float
    """What the limit is for: relative for values inside the text model, absolute for router weights and features."""
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit."""
        return self.error <= self.limit


def read_passes(directory: Path, rank: int = 0) -> list[Pass]:
    """All passes one rank has written to a folder, in order."""
    return [_read(path) for path in sorted(directory.glob(f"pass-*-rank{rank}.safetensors"))]


def _read(path: Path) -> Pass:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    lens = [tuple(json.loads(metadata[name])) for name in ("prefix_lens", "seq_lens", "snapshot_lens")]
    return Pass(metadata["mode"], *lens, values=values)


KINDS = {
    "attention mixture": ".attn_mix",
    "FFN mixture": ".ffn_mix",
    "stream after the layer": ".stream",
    "mixture before the final norm": "output_mix",
    "KDA state": ".kda_state",
    "KDA convolution window": ".kda_conv",
    "latent cache": ".mla_latent",
}
"""Kinds of values inside the text model, by the end of their names."""


def engine_values(recorded: Pass, request: int = 0) -> dict[str, Tensor]:
    """One request's values in the names and layout of our reference model's trace.

    The pass must hold this request alone: values of new tokens are those of the whole packed batch.
    """
    if len(recorded.seq_lens) != 1:
        raise ValueError(f"the pass holds {len(recorded.seq_lens)} requests; run one alone")
    prefix = f"request.{request}."
    own = {name.removeprefix(prefix): value for name, value in recorded.values.items() if name.startswith(prefix)}
    shared = {name: value for name, value in recorded.values.items() if name.startswith(("layer.", "router."))}
    return {**shared, **own, "output_mix": recorded.values["output_mix"]}


def golden_values(golden: Golden) -> dict[str, Tensor]:
    """Golden values of the 64-token prompt; the convolution window as an engine keeps it, [3, q|k|v channels]."""
    values = dict(golden.tensors("layers_len64"))
    for layer in golden.config.text.kda_layers:
        parts = [values.pop(f"layer.{layer}.kda_conv_{part}")[:, -3:].t() for part in "qkv"]
        values[f"layer.{layer}.kda_conv"] = torch.cat(parts, -1)
    return values


def reference_values(golden: Golden, ids: Sequence[int], state_ids: Sequence[int] | None = None) -> dict[str, Tensor]:
    """Our reference model's float32 values for ``ids`` after the tokens ``state_ids``."""
    model = golden.reference_model("float32")
    state = model.new_state()
    trace: dict[str, Tensor] = {}
    if state_ids:
        model(state_ids, state)
    model(ids, state, trace)
    return trace


def compare_components(got: Trace, wanted: Trace) -> Iterator[Component]:
    """One line per kind of value.

    Raises:
        KeyError: the engine's values lack one that is wanted.
        ValueError: shapes differ, or a wanted value belongs to no kind.
    """
    left = set(wanted)
    for title, ending in KINDS.items():
        names = sorted(name for name in left if name.endswith(ending))
        left -= set(names)
        if names:
            worst = max(relative_error(got[name], wanted[name]) for name in names)
            max_abs = max((got[name] - wanted[name]).abs().max().item() for name in names)
            yield Component(title, len(names), max_abs, worst, MAX_RELATIVE_ERROR)
    routers = sorted(name.removesuffix(".ids") for name in left if name.endswith(".ids"))
    left -= {f"{name}.{part}" for name in routers for part in ("ids", "weights")}
    if left:
        raise ValueError(f"no kind of component covers {sorted(left)[:3]}")
    yield from _routing(got, wanted, routers)


def _routing(got: Trace, wanted: Trace, routers: Sequence[str]) -> Iterator[Component]:
    """Chosen experts are sets: both sides are put in ascending order."""
    other_choices, weight_error = 0, 0.0
    for name in routers:
        sides = []
        for values in (got, wanted):
            ids, order = values[f"{name}.ids"].sort(-1)
            sides.append((ids, values[f"{name}.weights"].gather(-1, order)))
        (got_ids, got_weights), (wanted_ids, wanted_weights) = sides
        other_choices += int((got_ids != wanted_ids).any(-1).sum())
        weight_error = max(weight_error, (got_weights - wanted_weights).abs().max().item())
    yield Component("tokens routed to other experts", len(routers), other_choices, other_choices, 0)
    yield Component("router weights", len(routers), weight_error, weight_error, MAX_ROUTER_WEIGHT_ERROR)


def vision_component(golden: Golden) -> Component:
    """Features of every golden image by the modules that serve images, in this process."""
    from k3_sglang.parity.vision import golden_features, image_encoder

    encoder = image_encoder(golden)
    worst, count = 0.0, 0
    for patches, grid, wanted in golden_features(golden):
        with torch.inference_mode():
            worst = max(worst, (encoder(patches, grid) - wanted).abs().max().item())
        count += 1
    return Component("vision features (this process)", count, worst, worst, MAX_FEATURE_ERROR)
