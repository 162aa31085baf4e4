"""Products of the units' generating polynomials, in a tree."""
