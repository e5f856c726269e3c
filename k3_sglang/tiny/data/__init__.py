"""Training data of the tiny K3: conversations of a small synthetic world in K3's prompt format. Knows no torch."""

from k3_sglang.tiny.data.sample import Sample
from k3_sglang.tiny.data.stream import MIXES, samples

__all__ = ["MIXES", "Sample", "samples"]
