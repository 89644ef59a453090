"""FX → JAX → PPHLO: what is public, masked, deferred, checked and compiled."""
