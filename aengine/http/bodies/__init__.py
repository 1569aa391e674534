"""What requests and answers look like, as structs."""
