"""Share-level kernels: what the parties compute from the words of their shares, between two steps of a program."""
