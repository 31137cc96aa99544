"""On the board: a bundle in, answers over HTTP/1.1 out."""
