"""Trains one model together over ordinary links: the part that decides and computes."""
