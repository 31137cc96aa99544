"""The HTTP/1.1 face: Open Inference Protocol and its tensor codecs."""
