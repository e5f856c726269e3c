"""Looks at a machine and a checkpoint before an hour is spent on loading; starts nothing, changes nothing."""
