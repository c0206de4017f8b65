"""The ONNX master, requantizing it, and the runtime that switches widths. Nothing in here knows PyTorch."""
