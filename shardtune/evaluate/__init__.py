"""What the model says, and how it is judged."""
