"""OpenAI's Responses protocol: a codec to and from the gateway's one conversation, and the store behind it."""
