"""The live page: a local server on which a master runs at the width that a slider says. No PyTorch in here."""
