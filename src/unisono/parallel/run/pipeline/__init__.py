"""The stages of a pipeline, their passes and messages."""
