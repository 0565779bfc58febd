"""What the commands show: responses of the proxy as text for a terminal, and as HTML pages for a file.

Process: the commands.
May import: proxy.cli.
"""
