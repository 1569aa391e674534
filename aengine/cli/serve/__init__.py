"""`aengine serve`: the HTTP server in a process of its own."""
