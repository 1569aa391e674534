"""From hidden states to experts: the router, the choice of each token's experts, and the plan of rows by expert."""
