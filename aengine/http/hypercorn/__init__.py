"""Extensions of hypercorn, the HTTP server: connections, framing, requests in flight, shutdown."""
