"""Teaching: demonstrations of experts, fine-tuning on them, and the validations that end it."""
