"""Where weights are rounded without data, in plain numpy: the simulation and the runtime share these numbers."""
