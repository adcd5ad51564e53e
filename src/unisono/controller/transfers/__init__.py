"""Transfers: the interface to what moves a bucket (`transfer.py`), and its implementations."""
