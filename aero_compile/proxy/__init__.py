"""An OpenAI-compatible endpoint on the client's own machine, in front of a session of private generation."""
