"""Teaching: demonstrations of experts, fine-tuning on them, and the exams that end it."""
