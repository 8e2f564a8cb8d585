"""What a run needs: memory by part and tokens, from the model's shape and the configuration."""
