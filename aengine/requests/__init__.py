"""What a request may ask for: how its tokens are drawn, when it stops, and the form of its output."""
