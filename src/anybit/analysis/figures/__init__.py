"""The paper's figures: each one file with what it measures, as plain numbers, and how they are drawn."""
