"""Which exchange is fastest here: measure the link, predict the step, choose."""
