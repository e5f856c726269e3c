"""The commands of `python -m agent_runtime`."""
