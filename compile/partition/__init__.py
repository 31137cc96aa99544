"""Where a model is cut into segments: greedily, at the least cost, and what streaming them moves."""
