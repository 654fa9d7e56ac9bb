"""The parts of train.py: a module per task, with its dataset and models, and a run's settings, checks and record.

Nothing else in dgcopt imports them.
"""
