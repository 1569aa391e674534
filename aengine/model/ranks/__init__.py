"""What a rank holds of a model that is spread over several, and what its blocks call to work with the others."""
