"""Operators that do not fit alone are split: matrices by columns, activations by rows."""
