"""Several processes of one machine that train one model: each step's conversations shared out, gradients added up.

Every worker holds all parameters and makes the same optimiser step from the same sum of gradients, so the parameters
stay equal without being sent. The result depends on the number of workers only through the order of float additions.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from k3_sglang.tiny.train.data import Item

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_JOIN_SECONDS: Final = 30.0


class Workers:
    """One process alone; :class:`Together` overrides what needs the others."""

    rank: int = 0
    count: int = 1

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This worker's part of a step's conversations: longest first, each to whoever has the fewest tokens yet."""
        shares: list[list[Item]] = [[] for _ in range(self.count)]
        sizes = [0] * self.count
        for item in sorted(items, key=lambda item: len(item[0]), reverse=True):
            least = sizes.index(min(sizes))
            shares[least].append(item)
            sizes[least] += len(item[0])
        return shares[self.rank]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor, in place, by its sum over the workers."""

    def gather(self, value: T) -> list[T]:
        """Every worker's value, by rank."""
        return [value]

    def check_equal(self, tensors: Sequence[Tensor]) -> None:
        """Raises RuntimeError: the workers hold different values, so the run is not one model any more."""


class Together(Workers):
    """One of several processes, joined by torch's gloo backend."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def add(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def gather(self, value: T) -> list[T]:
        found: list[T | None] = [None] * self.count
        dist.all_gather_object(found, value)
        return [entry for entry in found if entry is not None]

    def check_equal(self, tensors: Sequence[Tensor]) -> None:
        sums = self.gather([float(tensor.detach().double().sum()) for tensor in tensors])
        if any(other != sums[0] for other in sums):
            raise RuntimeError(f"the {self.count} workers hold different parameters: the run cannot be trusted")


class _Job(Generic[T]):
    """What every worker runs: picklable, for processes that begin from nothing."""

    def __init__(self, function: Callable[[Workers, T], object], argument: T, count: int, meeting: str) -> None:
        self.function, self.argument, self.count, self.meeting = function, argument, count, meeting

    def run(self, rank: int) -> object:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{self.meeting}", rank=rank, world_size=self.count)
        try:
            return self.function(Together(), self.argument)
        finally:
            dist.destroy_process_group()

    def __call__(self, rank: int) -> None:
        # Ctrl-C reaches the whole group; the first worker hears it and tells the others at the end of the step.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.run(rank)


def run_together(function: Callable[[Workers, T], object], argument: T, count: int) -> object:
    """Run ``function(workers, argument)`` in ``count`` processes, one of which is this one; returns its result.

    Args:
        function: of a module's top level, for the others import it.
        argument: can be pickled.
        count: 1 starts no process.

    Raises:
        ChildProcessError: another worker ended before this one.
        ValueError: fewer than one worker.
    """
    if count < 1:
        raise ValueError(f"{count} workers; at least 1 is needed")
    if count == 1:
        return function(Workers(), argument)
    with tempfile.TemporaryDirectory(prefix="k3-train-") as temporary:
        job = _Job(function, argument, count, str(Path(temporary) / "meeting"))
        with _others(job, count):
            return job.run(0)


@contextmanager
def _others(job: _Job[T], count: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=job, args=(rank,), daemon=True) for rank in range(1, count)]
    for process in processes:
        process.start()
    _LOG.info("%d workers", count)
    try:
        yield
        for process in processes:
            process.join(_JOIN_SECONDS)
    except RuntimeError as error:  # what gloo says when the other end is gone
        for rank, process in enumerate(processes, 1):
            process.join(_JOIN_SECONDS)
            if process.exitcode:
                raise ChildProcessError(
                    f"worker {rank} of {count} ended with code {process.exitcode}; its own words are above. A run goes "
                    "on from its last checkpoint with --resume"
                ) from error
        raise
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
