"""The live operators that can run privately: ATen name → JAX function."""
