"""The parts of retraining: options, tokenizers, model sources, the training loop and its run directory."""
