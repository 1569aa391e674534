"""The arithmetic of embeddings and scores: vectors, probabilities, and how a model scores pairs."""
