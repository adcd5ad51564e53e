"""Drivers: how each library is asked to perform one operation. One library a file."""
