"""CUDA memory that processes share, its streams and its set-up."""
