"""Credit for logged runs: an advantage for each call of a model in a log. Nothing is trained."""
