"""Training of the tiny K3: a differentiable twin of the reference model, its optimiser, loop and export."""
