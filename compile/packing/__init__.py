"""Where buffers stand in an arena: greedy, then local search, then a complete search, each only if the last one left a
gap to the lower bound. `compile.packing.place.place` is the way in."""
