"""What all loops on a CPU share: how numba compiles and keeps them, threads for rows, mathematics of items and rows."""
