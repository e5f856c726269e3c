"""The OpenAI-shaped HTTP server in front of a token engine: text and tools outside, token ids inside."""
