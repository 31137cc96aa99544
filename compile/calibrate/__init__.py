"""Calibration: samples in, one range for every activation that is to be quantized out."""
