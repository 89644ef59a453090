"""What two parties run: a program and its parts, programs of a generation, and their checks on arrival.

Used by parties, the service and exports; start at `program.py`.
"""
