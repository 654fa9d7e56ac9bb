"""What to train on: one module per task, each with its dataset and its models. Nothing in dgcopt imports them."""
