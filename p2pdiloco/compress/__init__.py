"""Outer gradients as bytes and back."""
