"""GPUs a K3 is served on: memory, bandwidth and arithmetic of each kind, each figure with where it is from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from k3_sglang.launch.settings import SettingsError

MIB: Final = 1 << 20
GIB: Final = 1 << 30
TB: Final = 10**12

SHEET = "vendor data sheet, not checked here"
DRIVER = "total that the driver shows, from public logs, not checked here"


NETWORK_BYTES_S: Final = 50e9
"""Between machines, per GPU and direction: a 400 Gbit/s adapter for each, the usual build; an assumption."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Rates are dense peaks; None where the hardware has no such unit."""

    name: str
    memory_mib: int
    """What a driver shows as the total; SGLang computes with this number."""
    memory_source: str
    bandwidth_bytes_s: float
    fp8_flops: float | None
    fp4_flops: float | None
    per_node: int
    """GPUs of one machine that the usual systems have."""
    joined: int
    """GPUs that the vendor's own links join, without a network between them."""
    link_bytes_s: float
    """Of these links, per GPU, both directions together."""
    family: str
    """``sm90``, ``sm100``, ``sm103`` or ``gfx950``: what kernels are chosen by."""
    source: str
    """Of bandwidths and rates."""

    @property
    def memory_bytes(self) -> int:
        """Total memory."""
        return self.memory_mib * MIB

    @property
    def is_amd(self) -> bool:
        """Whether it is an AMD device; SGLang calls its device ``cuda`` too."""
        return self.family.startswith("gfx")


def _sheet_mib(gigabytes: int) -> int:
    """A data sheet's decimal gigabytes; drivers show up to 7 % more where the sheet means binary ones."""
    return gigabytes * 10**9 // MIB


GPUS: Final[dict[str, Gpu]] = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 81_559, f"{DRIVER} (modal-client#2797)", 3.35 * TB, 1.979e15, None, 8, 8, 0.9 * TB, "sm90", SHEET),
        Gpu("h200", 143_771, DRIVER, 4.8 * TB, 1.979e15, None, 8, 8, 0.9 * TB, "sm90", SHEET),
        Gpu("b200", 182_630, f"{DRIVER} (pytorch/ao#4002)", 7.67 * TB, 4.5e15, 9.0e15, 8, 8, 1.8 * TB, "sm100", SHEET),
        Gpu(
            "gb200",
            _sheet_mib(184),
            "tokenspeed#876",
            8.0 * TB,
            5.0e15,
            10.0e15,
            4,
            72,
            1.8 * TB,
            "sm100",
            SHEET,
        ),
        Gpu("b300", _sheet_mib(288), SHEET, 8.0 * TB, 4.5e15, 13.5e15, 8, 8, 1.8 * TB, "sm103", SHEET),
        Gpu("gb300", _sheet_mib(288), SHEET, 8.0 * TB, 5.0e15, 15.0e15, 4, 72, 1.8 * TB, "sm103", SHEET),
        Gpu("mi350x", _sheet_mib(288), SHEET, 8.0 * TB, 4.6e15, 9.2e15, 8, 8, 1.075 * TB, "gfx950", SHEET),
        Gpu("mi355x", _sheet_mib(288), SHEET, 8.0 * TB, 5.0e15, 10.1e15, 8, 8, 1.075 * TB, "gfx950", SHEET),
    )
}

DEVICE_MAJOR: Final = {"sm90": (9, 0), "sm100": (10, 0), "sm103": (10, 3), "gfx950": (9, 5)}
"""Compute capability as torch reports it."""


def find_gpu(name: str, memory_gib: float | None = None) -> Gpu:
    """A GPU kind by its name, with another amount of memory if given.

    Raises:
        SettingsError: no such kind, or an amount that is none.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise SettingsError(f"gpu is {name!r}; known kinds: {', '.join(GPUS)}")
    if memory_gib is None:
        return gpu
    if memory_gib <= 0:
        raise SettingsError(f"gpu_memory_gib is {memory_gib}; give the GiB that the driver shows, above 0")
    return replace(gpu, memory_mib=int(memory_gib * 1024), memory_source="given by the user")
