"""Sandboxes in Docker containers: what the container driver is made of.

The driver asks Docker for containers and a *keeper* process for each runs commands in it and looks at what they change,
from outside: no program of ours runs inside but a few lines of the image's own /bin/sh.
"""
