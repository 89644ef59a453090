"""From a model of any source to a canonical graph."""
