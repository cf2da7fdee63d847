"""Connection of a command to a Ray cluster: its address, a first attempt in a child process, and the connection itself."""
