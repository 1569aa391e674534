"""The endpoints, a file each: from a request to a response."""
