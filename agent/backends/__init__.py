"""How the engine drives a runtime, one module a runtime."""
