"""Rows in, one page out. Nothing in here knows a model or PyTorch."""
