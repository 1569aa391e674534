"""What the server under us needs: connections, framing, requests in flight, shutdown."""
