"""Memory sizing at start-up: pages, windows, snapshots of states, tokens in a step."""
