"""Arithmetic of K3's layers in plain PyTorch: no model, no pool management, no SGLang."""
