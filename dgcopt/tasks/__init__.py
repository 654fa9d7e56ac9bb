"""Training tasks: one module per task, with its dataset and models. Nothing in dgcopt imports them."""
