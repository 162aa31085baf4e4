"""What exact paths share, in plain torch: rows of scores, the guarded root search, numbers that nearly underflow."""
