"""ONNX files: written from a model, and counted."""
