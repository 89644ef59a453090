"""Recipes: passes in order, by name, label or text."""
