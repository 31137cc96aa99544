"""What a runtime needs of a graph, one module a runtime."""
