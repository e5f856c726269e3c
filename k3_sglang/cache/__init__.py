"""Prefix cache for recurrent state: which checkpoints are made, which are kept, and the adapter to SGLang's tree."""
