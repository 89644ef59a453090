"""The subcommands of `aero-compile`, one module each: its help, its options, and what it does.

A module loads nothing heavy before its `run`, so that every `--help` comes at once.
"""
