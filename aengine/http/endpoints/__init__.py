"""One file for each path: from a request to a reply."""
