"""From a release checkpoint to filled parameters."""
