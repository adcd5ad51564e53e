"""Measurements of the user: rates of links, and step times of own runs."""
