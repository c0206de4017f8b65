"""A task: which network, with which weights, on which data, judged by what."""
