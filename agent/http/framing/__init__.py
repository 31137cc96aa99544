"""How records stand in a stream of bytes: pure decoders and encoders, no I/O (docs/streams.md)."""
