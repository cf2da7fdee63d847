"""Workers for the commands ``plan`` and ``test``, placed as Ray Train places its own."""
