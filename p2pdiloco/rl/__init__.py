"""Reinforcement learning: environments, trajectories, the loss, and what is checked of others."""
