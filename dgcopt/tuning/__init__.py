"""The choice of the fastest exchange: measure the link, predict the step, choose."""
