"""Use FracTorchConfig if a script cannot pass it itself."""
