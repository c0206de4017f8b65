"""What is added to the loss so that the weights survive quantization."""
