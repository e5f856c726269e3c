"""Tools an agent may call: the registry, and the built-in file and shell tools."""
