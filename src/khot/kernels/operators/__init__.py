"""What makes an operation an operator of torch's: where it runs, its derivatives, and how DTensors may be placed."""
