"""Muon for the matrices, AdamW for everything else, and the router's bias by the sign rule.

Muon: momentum, then the nearest orthogonal matrix by Newton-Schulz (K. Jordan, 2024), scaled so that a step moves an
element as far as an AdamW step does (Moonlight, arXiv 2502.16982), which lets both share learning rate and decay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
"""Quintic of the Newton-Schulz step: drives singular values into about [0.7, 1.2]."""


@dataclass(frozen=True)
class OptimiserConfig:
    """Constants of both optimisers."""

    muon: bool = True
    weight_decay: float = 0.05
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    muon_rms: float = 0.2
    """Size of an element's Muon step at learning rate 1."""
    slow: float = 0.3
    """Factor on the learning rate of vectors (norms, decays, mixture scores)."""


def is_matrix(name: str, value: Tensor) -> bool:
    """Whether Muon moves this parameter: matrices inside layers with both sides of at least 16."""
    inside = ".layers." in name and not name.endswith(("gate.weight", "conv1d.weight", "b_proj.weight"))
    return inside and value.dim() >= 2 and min(value.shape[-2:]) >= 16


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearly the nearest orthogonal matrix of each of [..., rows, columns]."""
    first, third, fifth = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.transpose(-1, -2) if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.transpose(-1, -2)
        x = first * x + (third * square + fifth * (square @ square)) @ x
    return x.transpose(-1, -2) if tall else x


class Optimiser:
    """Moves parameters in place; ``state_dict`` holds all it remembers."""

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimiserConfig) -> None:
        self.config = config
        self.parameters = {name: value for name, value in parameters.items() if value.requires_grad}
        self.steps = 0
        self.first = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        adam = [name for name, value in self.parameters.items() if not (config.muon and is_matrix(name, value))]
        self.second = {name: torch.zeros_like(self.parameters[name]) for name in adam}
        groups: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, value in self.parameters.items():
            if name not in self.second:
                groups[tuple(value.shape[-2:])].append(name)
        self.groups = list(groups.values())

    @torch.no_grad()
    def step(self, learning_rate: float, max_norm: float) -> float:
        """One step from the parameters' gradients, which are dropped; returns their norm before clipping.

        Raises:
            FloatingPointError: the gradient is not finite; the parameters are unchanged.
        """
        grads = {name: value.grad for name, value in self.parameters.items() if value.grad is not None}
        missing = sorted(set(self.moved) - grads.keys())
        if missing:
            raise ValueError(f"no gradient for {missing[:3]}; every parameter must take part in the loss")
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads.values()])))
        if not norm < float("inf"):
            raise FloatingPointError(f"the gradient's norm is {norm} at step {self.steps}")
        for grad in grads.values():
            grad.mul_(min(1.0, max_norm / (norm + 1e-9)))
        self.steps += 1
        self._adam((name for name in self.second if name in grads), grads, learning_rate)
        for names in self.groups:
            self._muon(names, grads, learning_rate)
        for value in self.parameters.values():
            value.grad = None
        return norm

    @property
    def moved(self) -> list[str]:
        """Names of the parameters that take part in the loss.

        Layer 0 reads the embedding itself: its first mixture is in the checkpoint and in no equation.
        """
        unused = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
        return [name for name in self.parameters if name not in unused]

    def _adam(self, names: Iterable[str], grads: Mapping[str, Tensor], learning_rate: float) -> None:
        beta1, beta2 = self.config.betas
        for name in names:
            value, grad, first, second = self.parameters[name], grads[name], self.first[name], self.second[name]
            first.lerp_(grad, 1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            scale = second.div(1 - beta2**self.steps).sqrt_().add_(self.config.eps)
            vector = value.dim() == 1 or value.shape[0] == 1 or name.endswith("conv1d.weight")
            rate = learning_rate * (self.config.slow if vector else 1.0)
            if not vector:
                value.mul_(1 - rate * self.config.weight_decay)
            value.addcdiv_(first, scale, value=-rate / (1 - beta1**self.steps))

    def _muon(self, names: list[str], grads: Mapping[str, Tensor], learning_rate: float) -> None:
        momentum = self.config.momentum
        directions: list[Tensor] = []
        for name in names:
            first = self.first[name]
            first.mul_(momentum).add_(grads[name])
            ahead = grads[name] + momentum * first
            directions.append(ahead if ahead.dim() == 3 else ahead.unsqueeze(0))
        moved = orthogonalise(torch.cat(directions)).split([d.shape[0] for d in directions])
        size = self.config.muon_rms * max(directions[0].shape[-2:]) ** 0.5
        for name, update in zip(names, moved, strict=True):
            value = self.parameters[name]
            value.mul_(1 - learning_rate * self.config.weight_decay)
            value.add_(update.view_as(value), alpha=-learning_rate * size)

    def state_dict(self) -> dict[str, Any]:
        """Moments and step count."""
        return {"steps": self.steps, "first": self.first, "second": self.second}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.steps = state["steps"]
        for mine, theirs in ((self.first, state["first"]), (self.second, state["second"])):
            if mine.keys() != theirs.keys():
                raise ValueError(f"the optimiser's state is of other parameters: {sorted(mine.keys() ^ theirs)[:3]}")
            for name, value in theirs.items():
                mine[name].copy_(value)


@torch.no_grad()
def balance_router(bias: Tensor, load: list[int], rate: float) -> None:
    """Raise the bias of experts that got less than the mean, lower the others', by ``rate`` each; mean kept at zero."""
    got = torch.tensor(load, dtype=torch.float32, device=bias.device)
    bias += rate * torch.sign(got.mean() - got)
    bias -= bias.mean()
