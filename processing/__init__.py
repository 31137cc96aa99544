"""Recipes at work: images to tensors, outputs to answers. A leaf that agent and compiler share."""
