"""One file per figure, table or claim."""
