"""The documentation site: MkDocs settings, what is done to the pages while they are built, and the build itself.

`./run docs` builds the site into `proxy/ui/manual`, where the proxy serves it below `/manual/`. A wheel contains it
wherever MkDocs is installed. Nothing here is imported by the proxy, and a start needs no built site.
"""
