"""What makes an operation a torch operator: where it runs, its derivatives, and how DTensors may be placed."""
