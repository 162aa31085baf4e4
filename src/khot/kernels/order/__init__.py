"""Soft ranks, sorted values and permutations of sorted rows."""
