"""The mathematics of the designs, in plain torch."""
