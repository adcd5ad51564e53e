"""Who may connect, and the connections between hosts themselves."""
