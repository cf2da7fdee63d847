"""Connection of a command to a Ray cluster: its address, a first attempt that can be ended, Ray itself."""
