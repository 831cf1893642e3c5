"""Tensor maths of the outer loop; each formula with its paper."""
