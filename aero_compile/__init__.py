"""Rewrite GPT-2-like PyTorch models for private inference, retrain them, and run them in real 2PC."""

__version__ = "0.1.0"
