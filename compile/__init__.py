"""Offline: an ONNX model and a board in, a bundle that provably fits out."""
