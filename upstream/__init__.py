"""What ray_fracbackend would give to Ray, piece by piece; docs/upstream.md says why.

Each piece is the code of one pull request, written against the modules of
ray_fracbackend that would move with it. ``upstream.install.as_if_merged`` puts pieces
into the running Ray.
"""
