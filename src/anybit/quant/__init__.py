"""Capture, fold, find ranges, simulate: a float network in, one that runs at any width out."""
