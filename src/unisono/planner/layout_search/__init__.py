"""The search for the fastest layouts of a model on a cluster."""
