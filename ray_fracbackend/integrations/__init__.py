"""FracTorchConfig where a script cannot pass it itself."""
