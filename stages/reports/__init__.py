"""Reports of commands: what they print, and the pages and files that they write.

Each report has a module of its own, which takes the command's result; `pages` has the blocks and charts that all pages
are built from.
"""
