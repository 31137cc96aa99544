"""Graph passes: frozen dataclasses whose fields are their options."""
