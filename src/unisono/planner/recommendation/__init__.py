"""Recommendation models (DLRM): their sizes, placement of tables, step time and memory."""
