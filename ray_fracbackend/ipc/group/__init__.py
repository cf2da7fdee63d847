"""What torch sees of the backend: the process group, its calls and their Work."""
