"""Tasks and watchers that an engine runs only if it is configured so: adapters, KV tiers, KV events."""
