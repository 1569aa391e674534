"""A model spread over several ranks: the part that each rank holds, and the sums over all ranks."""
