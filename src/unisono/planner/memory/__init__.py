"""Bytes on a device: weights, gradients, optimizer states and activations."""
