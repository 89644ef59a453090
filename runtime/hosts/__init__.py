"""Two processes: how they are started, linked, slowed down and measured."""
