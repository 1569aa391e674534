"""How much of everything there is: pages, windows, snapshots of states, tokens in a step, and the memory for them."""
