"""Every step: gradients, or the updates made of them, are exchanged before the optimizer steps."""
