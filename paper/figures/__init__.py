"""The figures of the paper, each from run folders: one file measures and draws one figure."""
