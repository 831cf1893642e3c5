"""The inner loop: models, data, steps."""
