"""One party of a session as a process of its own, and how the side that started it tells it what to do."""
