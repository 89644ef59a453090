"""Shared parts of passes: choices of layers, heads and norms, and edits of weights and heads.

Used by the passes beside it, and by yours; start at `options.py`.
"""
