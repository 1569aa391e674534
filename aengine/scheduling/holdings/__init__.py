"""What a sequence holds, pages, windows and snapshots: taken, found in the tree, loaded from below it, given back."""
