"""Training of the bundled tiny models: tokenizer, architecture, supervised fine-tuning, evaluation."""
