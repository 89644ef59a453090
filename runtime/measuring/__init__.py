"""What two parties exchange, measured: the bill by operator, an emulated network, rounds in lockstep.

Used by `aero_compile.runtime.inference`; start at `bill.py`.
"""
