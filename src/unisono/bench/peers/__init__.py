"""Drivers that let each library perform an operation; one file per library."""
