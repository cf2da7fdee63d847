"""The part of the backend that torch calls: the process group, its collectives and their Work."""
