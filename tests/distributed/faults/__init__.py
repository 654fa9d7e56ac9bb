"""Faults of every kind, injected one at a time into small trainings; run by scripts/inject_faults.py."""
