"""Learning from rollouts: who plays which turn, whether it is true, and who learns from it."""
