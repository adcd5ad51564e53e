"""The passes of a step, its checks, and its end."""
