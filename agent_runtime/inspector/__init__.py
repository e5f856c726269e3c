"""A small web page over the gateway's record: sessions, steps to scale, exact prompts, the engine's checkpoints."""
