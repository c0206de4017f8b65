"""One small view of a network, filled from `torch.export` or from an ONNX file."""
