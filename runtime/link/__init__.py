"""How two parties exchange bytes: SPU's transport, TLS certificates, and the channel of control messages.

Used by `aero_compile.serving` and by parties; start at `channel.py`.
"""
