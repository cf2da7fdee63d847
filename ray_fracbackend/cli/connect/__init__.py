"""Connection of a command to a Ray cluster: its address and the connection itself."""
