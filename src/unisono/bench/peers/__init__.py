"""Drivers that perform operations with each library, one file per library."""
