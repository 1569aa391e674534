"""What a decoder is made of: each block takes the residual stream and gives it back with its own part added."""
