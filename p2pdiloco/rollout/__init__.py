"""Rollouts: one model that answers many requests at once, and whose tokens anyone can re-check."""
