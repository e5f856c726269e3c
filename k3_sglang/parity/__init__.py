"""Does the engine compute what the reference computes? Comparisons shared by tests and ``benchmarks/parity.py``."""
