"""Check: environments and agents examined before training."""
