"""Start engine and gateway as one server: settings, resolve, preflight, command, supervise (one module per stage)."""
