"""Context compression: when (trigger), what stays (plan), how it is done and what can go wrong (run)."""
