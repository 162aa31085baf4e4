"""Thresholds by absolute value, magnitudes and signed masks, and their derivatives."""
