"""The web page at `/ui`: its files, and the routes that it alone needs so far."""
