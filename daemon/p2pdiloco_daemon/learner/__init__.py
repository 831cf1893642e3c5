"""The learner process, and the daemon's side of it."""
