"""What people use without training: one call, one command, one page."""
