"""The rollout worker process, the daemon's side of it, and what it serves to users."""
