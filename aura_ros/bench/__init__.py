"""Measurements: what the parts of this package cost on a machine, each against a plain twin of itself."""
