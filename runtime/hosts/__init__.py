"""Two processes of one forward: how they are started, what each is given, and how they end.

Used by `private_inference` and by parties on two hosts; start at `parties.py`.
"""
