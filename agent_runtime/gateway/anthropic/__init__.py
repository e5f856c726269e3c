"""Anthropic's Messages API: a codec to and from the gateway's one conversation, and its routes."""
