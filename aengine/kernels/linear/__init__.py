"""Products with weight matrices, where a library's are not the fastest."""
