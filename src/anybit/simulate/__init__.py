"""Execute a plan in PyTorch: `QuantizedNetwork`, with gradients, on any device."""
