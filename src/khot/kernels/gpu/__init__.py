"""What all Triton kernels share: blocks and warps, arguments of launchers, random numbers, fast arithmetic."""
