"""Decide once: passes over the graph view, and the `Plan` that says what happens at any width. No torch in here."""
