"""Clients of engines: token ids over SGLang's /generate, and messages over an OpenAI-shaped endpoint."""
