"""What all CPU loops share: how numba compiles and caches them, threads for rows, mathematics of items and rows."""
