"""The bodies of requests and responses, as structs."""
