"""Text as blocks of tokens: sources, tokenizer, caches, streams, near-duplicates.

Used by `aero_compile.retrain`; start at `blocks.py`.
"""
