"""Share-level kernels: what each party computes from its own shares, between two steps, without a message."""
