"""Accuracy, loss and divergence at any number of widths, as rows."""
