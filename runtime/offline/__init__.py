"""Preparations: what two parties compute before the tokens are known, and keep for one run."""
