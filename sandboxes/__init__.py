"""Where calls run: the drivers, what they promise, and the values that cross into this room."""
