"""What a node holds in memory and on disk."""
