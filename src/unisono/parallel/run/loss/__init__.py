"""The loss of a batch that is computed in parts."""
