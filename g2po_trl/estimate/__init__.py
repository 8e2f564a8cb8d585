"""What a run needs: memory by part, tokens, seconds and money, from the model's shape and the configuration."""
