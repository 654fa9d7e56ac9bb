"""The parts of train.py: one module per task, with its dataset and models, and the parser of its settings.

Nothing else in dgcopt imports them.
"""
