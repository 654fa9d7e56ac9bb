"""What callers of the generators share: exchanges in flight, the vote, and what must be equal on all ranks."""
