"""The embedded model: a K3 of a few million parameters in the release's layout, for machines without GPUs."""

from k3_sglang.tiny.checkpoint import build, ensure

__all__ = ["build", "ensure"]
