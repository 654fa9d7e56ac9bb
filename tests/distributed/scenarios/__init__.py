"""Scenarios that real ranks run. Nothing is imported here: a rank loads the modules of its own scenarios."""
