"""Which nodes of a model run where: at the client, at the server in the clear, or on secret shares.

Used by `aero_compile.runtime.lowering`; start at `partition.py`.
"""
