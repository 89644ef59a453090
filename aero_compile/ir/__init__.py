"""The model as a graph: its values, edits, weights and checks.

Used by captures, passes, training and the runtime; start at `graph_model.py`.
"""
