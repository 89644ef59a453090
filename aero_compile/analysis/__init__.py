"""The parts of a decoder, found in its graph."""
