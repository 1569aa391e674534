"""What every request passes: its id, hosts and origins, keys, the body, bursts, and errors on the way out."""
