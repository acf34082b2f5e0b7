"""The action-sufficiency certificate: formula, measurements, and a process to prove it on (paper sections 4, 6.5, 6.6)."""
