"""Functions that Cheetah computes cheaply: squares, exponentials, reciprocals, activations, full ciphertexts."""
