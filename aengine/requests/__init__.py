"""The parameters of a request: how its tokens are drawn, when it stops, and the form of its output."""
