"""Link functions: what distinguishes one relaxed top-k mask from another."""
