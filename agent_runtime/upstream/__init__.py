"""Other servers of K3 as the gateway sees them: messages go out and come back exactly, without token ids."""
