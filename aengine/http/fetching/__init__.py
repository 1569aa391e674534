"""Fetches images by their URLs: which hosts and addresses the server may reach, and how it reads a file from them."""
