"""What the runtime remembers about conversations: the token ids each turn really consisted of."""
