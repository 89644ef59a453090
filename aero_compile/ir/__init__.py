"""The model as a graph: edits, passes, weights, artifacts."""
