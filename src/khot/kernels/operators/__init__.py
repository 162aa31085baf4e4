"""What makes an operation a torch operator: where it runs, and its derivatives."""
