"""What the node tells its owner: page, JSON, metrics."""
