"""vLLM servers on other machines, which load each rollout's weights from a shared folder."""
