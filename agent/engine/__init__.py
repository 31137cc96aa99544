"""The engine process: the only one that loads a runtime."""
