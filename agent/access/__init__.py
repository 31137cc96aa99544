"""Who may do what: TLS, tokens, peers of Unix sockets, roles, and the audit of what administrators do."""
