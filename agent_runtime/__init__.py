"""The agent side of the stack: gateway, token-exact engine client, tools, loop. Needs no torch, no sglang."""
