"""What one private softmax needs: mask, row maximum, exponential, packing, a deferred division.

Used by `aero_compile.runtime.lowering`; start at `softmax.py`.
"""
