"""PPO: a critic and generalised advantage estimates in place of the graph."""
