"""Real agent clients, unmodified, run against the gateway and against plain SGLang; what happened becomes a matrix."""
