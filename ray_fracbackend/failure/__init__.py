"""What a start does once it has failed; nothing here is imported on the good path. Driver or controller."""
