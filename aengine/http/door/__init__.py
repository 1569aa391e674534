"""What every request passes: its id, hosts, origins, API keys, the reading of its body, and errors."""
