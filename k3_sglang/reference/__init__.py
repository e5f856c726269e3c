"""The meaning of K3's text model: plain PyTorch, every equation once, no engine. The slow twin of the served model."""
