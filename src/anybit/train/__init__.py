"""Recipes, schedules, the training loop and the run folder."""
