"""The states of recurrent layers, and the computations that several kinds of these layers share."""
