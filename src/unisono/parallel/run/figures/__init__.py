"""The figures of a run: bytes, memory and times, predicted and measured."""
