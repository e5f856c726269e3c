"""The checkpoint radix cache: where recurrent states are kept and which of them stay."""
