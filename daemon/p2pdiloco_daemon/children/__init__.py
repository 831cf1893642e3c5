"""Processes that the daemon starts, speaks with and keeps alive."""
