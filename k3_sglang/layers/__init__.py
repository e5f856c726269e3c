"""The layers of K3; they know dimensions and tensors, no cache and no scheduler."""
