"""The board itself: how hot it is, whether it is slowed down, what its storage has left, what its clock is worth."""
