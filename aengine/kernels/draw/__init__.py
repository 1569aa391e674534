"""A draw from each row of logits, and the cutoffs of top_k, top_p and min_p, without a sort."""
