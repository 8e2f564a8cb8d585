"""vLLM servers on other machines, which get each rollout's weights through a shared folder."""
