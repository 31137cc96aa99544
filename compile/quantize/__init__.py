"""Weight quantizers: tensors in, packed codes and scales out, slab by slab."""
