"""The status page at `/`, and the figures on it (docs/status-page.md)."""
