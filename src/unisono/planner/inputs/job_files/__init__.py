"""Reads the layout, workload and model of another framework's job file."""
