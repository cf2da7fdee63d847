"""The backend as torch sees it: the process group, its collectives and their Work objects."""
