"""Exact rewrites for inference: the same function, fewer and cheaper private operators."""
