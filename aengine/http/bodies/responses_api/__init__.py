"""The bodies of `/v1/responses`: requests, the items of a conversation, tools, answers."""
