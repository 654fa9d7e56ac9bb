"""All trials; importing a module adds its own to the table."""

from . import around, frameworks, models, optimizers, parallel

__all__ = ["around", "frameworks", "models", "optimizers", "parallel"]
