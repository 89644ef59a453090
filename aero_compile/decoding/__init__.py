"""Models as steps: new positions computed from what is cached of earlier ones."""
