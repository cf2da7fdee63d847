"""Code that runs only after a failed start; not imported on the good path. Driver or controller."""
