"""Transfers, which move the data of buckets: the interface (`transfer.py`) and implementations."""
