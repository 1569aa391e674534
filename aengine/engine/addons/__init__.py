"""Optional tasks of an engine: adapters, KV tiers, KV events."""
