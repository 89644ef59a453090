"""What a compiled program would cost, operation by operator, without running it."""
